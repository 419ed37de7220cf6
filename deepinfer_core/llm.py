"""LLM: a model in a Python program. Load it once, then generate, stream, chat or score."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from deepinfer_core.assemble import Progress, RunningModel, assemble
from deepinfer_core.config import Config, ResolvedConfig, load_config
from deepinfer_core.engine.metrics import RequestMetrics
from deepinfer_core.engine.outputs import ChoiceResult, RequestHandle, TokenOutput, TokenScore
from deepinfer_core.engine.score import text_logits
from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.progress import progress_bar
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""

SHORT_NAMES = {
    "max_model_len": "cache.max_model_len",
    "kv_memory": "cache.memory",
    "page_size": "cache.page_size",
    "policy": "scheduler.policy",
}
"""Keyword -> config key, for the keys whose section need not be said."""


@frozen(kw_only=True)
class RequestOutput:
    """One finished generation.

    Attributes:
        prompt: The text, None when token ids were given.
        prompt_token_ids: What the model read.
        text: What it wrote; an end token is not shown.
        token_ids: What it generated, an end token included.
        finish_reason: ``"stop"`` (an end token or a stop string) or ``"length"``.
        metrics: Times: `ttft`, `tpot`, `itl` and more, in seconds.
        choices: All ``n`` answers; text, tokens, reason and metrics above are those of the first.
        prompt_scores: Log probabilities of the prompt's tokens, None for the first; empty when not asked for.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    metrics: RequestMetrics
    choices: tuple[ChoiceResult, ...]
    prompt_scores: tuple[TokenScore | None, ...]


@frozen(kw_only=True)
class StreamOutput:
    """One step of a streamed generation.

    Attributes:
        text: The text that became certain, possibly none; joined, the texts are the whole answer.
        token_id: The token.
        finish_reason: None until the last one.
        metrics: Times so far.
        index: Which of the ``n`` answers it belongs to.
        score: The token's log probability, when asked for.
    """

    text: str
    token_id: int
    finish_reason: str | None
    metrics: RequestMetrics
    index: int = 0
    score: TokenScore | None = None


class LLM:
    """A loaded model.

    Args:
        model: Checkpoint directory or GGUF file; None when the config names it.
        config: A TOML file, a `Config`, or a `ResolvedConfig`.
        catalog: Installed plugins; found anew when None.
        progress: Called with (parts loaded, parts in all) while the weights load.
        **overrides: Config keys over the config: ``dtype="float32"``, ``max_model_len=2048``, ``kv_memory="1GiB"``,
            ``policy="..."``, sections as mappings (``cache={"page_size": 32}``), or dotted keys in a ``**`` mapping.

    Raises:
        DeepinferError: The model, a name or a size cannot be; the message says what is possible.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: str | Path | Config | ResolvedConfig | None = None,
        *,
        catalog: Catalog | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> None:
        resolved = _resolve(config, {SHORT_NAMES.get(key, key): value for key, value in overrides.items()})
        chosen = resolved.config if model is None else evolve(resolved.config, model=str(model))
        self.running: RunningModel = assemble(chosen, catalog=catalog, progress=progress, describe=resolved.describe)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.running.tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, as many together as memory allows; outputs come in the order of the prompts.

        Args:
            prompts: One or several, as text or as token ids.
            params: For all of them, or one each.
            progress: Show a bar on standard error; by default for several prompts in a terminal.

        Raises:
            RequestError: A prompt or a sampling value cannot be served.
            CapacityError: A prompt and its answer are longer than ``max_model_len`` or the cache. Nothing was computed.
        """
        several = _as_list(prompts)
        each = [params or SamplingParams()] * len(several) if not isinstance(params, Sequence) else list(params)
        for p in each:
            if not isinstance(p, SamplingParams):
                raise RequestError(f"params = {p!r}: give SamplingParams(...), or a list of them")
        if len(each) != len(several):
            raise RequestError(f"{len(several)} prompts came with {len(each)} SamplingParams; give one, or one each")
        engine = self.running.engine
        all_ids = [self._ids(prompt) for prompt in several]
        for ids, p in zip(all_ids, each, strict=True):
            engine.check(ids, p)  # nothing is computed when one of them cannot be
        handles = [engine.submit(ids, p) for ids, p in zip(all_ids, each, strict=True)]
        try:
            with progress_bar(len(handles), "prompts", shown=progress) as show:
                engine.drive(lambda: show(sum(handle.done for handle in handles)) == len(handles))
        except BaseException:
            self._abort(handles)
            raise
        return [self._output(prompt, handle) for prompt, handle in zip(several, handles, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamOutput]:
        """Answer one prompt token by token; closing the iterator ends the generation and returns its memory.

        Raises:
            RequestError: As for `generate`, before the first token.
            CapacityError: Likewise.
        """
        handle = self.running.engine.submit(self._ids(prompt), params or SamplingParams())
        return self._stream(handle)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> RequestOutput:
        """Answer a conversation, written down by the model's own chat template.

        Args:
            messages: ``{"role": "user", "content": "..."}`` in order.
            params: How to sample.
            **variables: Further variables of the template.

        Raises:
            RequestError: The template refused the messages, or as for `generate`.
        """
        return self.generate([self.tokenizer.encode_chat(messages, **variables)], params)[0]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return float32 logits ``[tokens, vocab]`` on the CPU: row i is what the model says after token i."""
        return torch.cat([chunk.cpu() for chunk in self._text_logits(tokens)])

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log probability of each token after the first: float32 ``[tokens - 1]``."""
        targets = torch.tensor(list(tokens[1:]))
        found: list[torch.Tensor] = []
        done = 0
        for chunk in self._text_logits(tokens):
            rows = chunk.cpu()[: max(0, len(targets) - done)]
            chosen = rows.gather(1, targets[done : done + len(rows), None])
            found.append(chosen[:, 0] - rows.logsumexp(-1))
            done += len(rows)
        return torch.cat(found)

    def _text_logits(self, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        engine = self.running.engine
        engine.check(tokens, SamplingParams(max_tokens=1))
        with engine.exclusive():
            yield from text_logits(self.running.decoder, self.running.cache, tokens, engine.limits.prefill_chunk_tokens)

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _stream(self, handle: RequestHandle) -> Generator[StreamOutput]:
        try:
            while (output := self._next(handle)) is not None:
                if output.token is not None:
                    yield StreamOutput(
                        text=output.text,
                        token_id=output.token,
                        finish_reason=output.finish_reason,
                        metrics=handle.metrics[output.index],
                        index=output.index,
                        score=output.score,
                    )
        finally:
            self._abort([handle])

    def _next(self, handle: RequestHandle) -> TokenOutput | None:
        self.running.engine.drive(handle.ready)
        return next(iter(handle), None)

    def _abort(self, handles: Sequence[RequestHandle]) -> None:
        """End what has not ended, and see it ended: its memory is free when this returns."""
        running = [handle for handle in handles if not handle.done]
        for handle in running:
            handle.abort()
        self.running.engine.drive(lambda: all(handle.done for handle in running))

    def _output(self, prompt: Prompt, handle: RequestHandle) -> RequestOutput:
        result = handle.result()
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=result.prompt_ids,
            text=result.text,
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            metrics=result.choices[0].metrics,
            choices=result.choices,
            prompt_scores=result.prompt_scores,
        )


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list; a list of token ids alone is one prompt.

    Raises:
        RequestError: Something in it is neither text nor a list of token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts = {prompts!r}: a prompt is text or a list of token ids")
    several: list[Any] = list(prompts)
    if several and all(isinstance(p, int) for p in several):
        return [several]
    for i, prompt in enumerate(several):
        if not isinstance(prompt, str | Sequence):
            raise RequestError(f"prompts[{i}] = {prompt!r}: a prompt is text or a list of token ids")
    return several


def _resolve(config: str | Path | Config | ResolvedConfig | None, overrides: dict[str, Any]) -> ResolvedConfig:
    if not isinstance(config, Config | ResolvedConfig):
        return load_config(config, overrides)
    if overrides:
        raise ConfigError(
            f"{', '.join(sorted(overrides))}: they go over a file; change a Config object with attrs.evolve"
        )
    if isinstance(config, ResolvedConfig):
        return config
    return ResolvedConfig(config=config, origins=defaultdict(lambda: "Config object"))
