"""``deepinfer generate``: stream the answers to prompts, and say how long the tokens took."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import evolve

from deepinfer_core.cli import options
from deepinfer_core.errors import RequestError

if TYPE_CHECKING:
    from deepinfer_core.engine.metrics import RequestMetrics
    from deepinfer_core.llm import LLM
    from deepinfer_core.sampling import SamplingParams

Number = Annotated[float | None, typer.Option(show_default=False)]
Whole = Annotated[int | None, typer.Option(show_default=False)]


def command(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory or GGUF file.", show_default=False)] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="What to answer; may be repeated.", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_k: Whole = None,
    top_p: Number = None,
    min_p: Number = None,
    seed: Whole = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False,
    config: options.ConfigFile = None,
    sets: options.SetKeys = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KvMemory = None,
    policy: options.Policy = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    no_prefill_decode_overlap: options.NoOverlap = False,
    trace: options.Trace = None,
) -> None:
    """Stream the answers to one or more prompts; times go to standard error.

    Example: deepinfer generate models/m --chat -p "What is the capital of France?"
    """
    if not prompt:
        raise RequestError('there is nothing to answer; give --prompt "..."')
    overrides = options.overrides(
        sets=sets,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        policy=policy,
        dtype=dtype,
        device=device,
        backend=backend,
        no_prefill_decode_overlap=no_prefill_decode_overlap,
    )
    chosen: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    from deepinfer_core.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    from deepinfer_core.config import load_config
    from deepinfer_core.llm import LLM

    resolved = load_config(config, overrides)
    if model is not None:
        resolved = evolve(resolved, config=evolve(resolved.config, model=model))
    with options.tracing(trace) as attach:
        llm = LLM(config=resolved)
        attach(llm.running.engine)
        _answer_all(llm, prompt, params, chat=chat, system=system)


def _answer_all(llm: LLM, texts: list[str], params: SamplingParams, *, chat: bool, system: str | None) -> None:
    prompts = [_prompt_ids(llm, text, chat=chat, system=system) for text in texts]
    for ids in prompts:
        llm.running.engine.check(ids, params)  # say what cannot be before the first answer begins
    for text, ids in zip(texts, prompts, strict=True):
        if len(prompts) > 1:
            print(f"> {text}")
        _answer(llm, ids, params)


def _prompt_ids(llm: LLM, text: str, *, chat: bool, system: str | None) -> list[int]:
    if not chat:
        if system is not None:
            raise RequestError("--system needs --chat: a plain prompt has no system message")
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def _answer(llm: LLM, ids: list[int], params: SamplingParams) -> None:
    last = None
    for last in llm.stream(ids, params):
        print(last.text, end="", flush=True)
    print(flush=True)
    if last is not None:  # with --max-tokens 0 there is no token
        print(timing(last.metrics, last.finish_reason or ""), file=sys.stderr, flush=True)


def timing(metrics: RequestMetrics, reason: str) -> str:
    """Return one line: prompt and answer in tokens, time to the first one, and time for each further one."""
    text = f"[{metrics.prompt_tokens} prompt + {len(metrics.token_times)} tokens, {reason}"
    if metrics.ttft is not None:
        text += f"; TTFT {metrics.ttft * 1e3:.1f} ms"
    if metrics.tpot:
        text += f"; TPOT {metrics.tpot * 1e3:.2f} ms = {1 / metrics.tpot:.1f} tokens/s"
    return f"{text}]"
