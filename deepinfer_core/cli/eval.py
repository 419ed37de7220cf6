"""``deepinfer eval``: perplexity of a text, and how often another checkpoint would have said the same."""

from __future__ import annotations

import gc
import json as json_text
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import define, evolve, field

from deepinfer_core.cli import options
from deepinfer_core.cli.console import console
from deepinfer_core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import torch

    from deepinfer_core.config import ResolvedConfig
    from deepinfer_core.llm import LLM
    from deepinfer_core.registry.catalog import Catalog


def command(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory or GGUF file.", show_default=False)] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="UTF-8 text; without it, the prose that ships with deepinfer.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Another checkpoint of the model, such as its source.", show_default=False),
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens read together; 512, or fewer.", min=2)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Read no more of the text than this.", min=2)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result here as JSON.")] = None,
    config: options.ConfigFile = None,
    sets: options.SetKeys = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
) -> None:
    """Measure perplexity on a text; with --against, also how often both models' likeliest next token is the same.

    Example: deepinfer eval models/m-w4 --text book.txt --against m.gguf --dtype float32

    Windows do not overlap and each begins with an empty context, as in the report of deepinfer quantize. With
    --dtype float32 the weight formats are compared, otherwise also what the kernels round.
    """
    from deepinfer_core.assemble import catalog_for
    from deepinfer_core.config import load_config
    from deepinfer_core.quantize.perplexity import TEXT_NAME, WINDOW, public_domain_text

    resolved = load_config(config, options.overrides(sets=sets, dtype=dtype, device=device, backend=backend))
    if model is not None:
        resolved = evolve(resolved, config=evolve(resolved.config, model=model))
    if not resolved.config.model:
        raise ConfigError('no model was named: give a path, or model = "PATH" in the config')
    content = public_domain_text() if text is None else _read(text)
    catalog = catalog_for(resolved.config)
    ask = Question(text=content, window=window or WINDOW, most=max_tokens)
    names = [resolved.config.model, *([against] if against is not None else [])]
    answers = []
    for name in names:
        with console(stderr=True).status(f"reading the text with {name}"):
            answers.append(_measure(name, resolved, catalog, ask))
        gc.collect()  # two models need not be there at once
    result = {"text": TEXT_NAME if text is None else str(text), "window": ask.window, **summary(names, answers)}
    _print(result)
    if output is not None:
        output.write_text(json_text.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"written to {output}")


@define
class Question:
    """What is asked of each model: the first one's context may make the window smaller, and the second keeps to it."""

    text: str
    window: int
    most: int | None
    settled: bool = False

    def settle(self, longest: int) -> None:
        """Fit the window to a model that can score ``longest`` tokens together.

        Raises:
            RequestError: The model before has already read longer windows.
        """
        if self.settled and longest < self.window:
            raise RequestError(
                f"one model read windows of {self.window} tokens, the other can read {longest} at most; give --window "
                f"{longest}"
            )
        self.window, self.settled = min(self.window, longest), True


@define(eq=False)
class Answer:
    """What one model says about the text.

    Attributes:
        perplexity: Over all tokens but each window's first.
        tokens: How many that are.
        ids: The text as this model's tokenizer reads it.
        choices: Likeliest next token at every position that was scored.
        dtype: Of its activations.
    """

    perplexity: float
    tokens: int
    ids: list[int]
    choices: torch.Tensor
    dtype: str


@define(eq=False)
class Scorer:
    """Scores a window for `perplexity`, and keeps what the model would have said."""

    llm: LLM
    choices: list[torch.Tensor] = field(factory=list)

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log probability of each but the first token ``[T - 1]``."""
        import torch

        logits = self.llm.logits(tokens)[:-1]
        self.choices.append(logits.argmax(-1))
        chosen = logits.gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]
        return chosen - logits.logsumexp(-1)


def summary(names: Sequence[str], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return plain data about one model, or two side by side.

    Raises:
        RequestError: The two read the text as different tokens, so that nothing can be compared.
    """
    rows = [
        {"model": name, "dtype": answer.dtype, "perplexity": answer.perplexity, "tokens": answer.tokens}
        for name, answer in zip(names, answers, strict=True)
    ]
    if len(answers) == 1:
        return {"models": rows}
    mine, other = answers
    if mine.ids != other.ids:
        raise RequestError(
            f"{names[0]} and {names[1]} have different tokenizers: the text is {len(mine.ids)} tokens to one and "
            f"{len(other.ids)} to the other, or other ones; compare checkpoints of the same model"
        )
    same = int((mine.choices == other.choices).sum())
    agreement = {"top1_agreement": same / len(mine.choices), "top1_same": same}
    return {"models": rows, "perplexity_ratio": mine.perplexity / other.perplexity, **agreement}


def _measure(name: str, resolved: ResolvedConfig, catalog: Catalog, ask: Question) -> Answer:
    import torch

    from deepinfer_core.llm import LLM
    from deepinfer_core.quantize.perplexity import perplexity

    llm = LLM(name, resolved, catalog=catalog)
    ids = llm.tokenizer.encode(ask.text)[: ask.most]
    if len(ids) < 2:
        raise RequestError(f"the text is {len(ids)} tokens; perplexity needs at least 2")
    ask.settle(llm.running.engine.limits.max_model_len - 1)  # a request leaves room for an answer
    scorer = Scorer(llm)
    value, tokens = perplexity(scorer, ids, window=ask.window)
    return Answer(value, tokens, ids, torch.cat(scorer.choices), llm.running.place.dtype_name)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path}: not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"--text {path}: cannot be read: {error.strerror or error}") from None


def _print(result: Mapping[str, Any]) -> None:
    for row in result["models"]:
        print(f"{row['model']} ({row['dtype']}): perplexity {row['perplexity']:.4f} over {row['tokens']} tokens")
    if "top1_agreement" in result:
        print(
            f"perplexity {result['perplexity_ratio']:.4f} times the other's; the likeliest next token is the same at "
            f"{result['top1_agreement']:.2%} of positions"
        )
