"""The requests of a serving bench: deterministic prompts through the model's tokenizer, and a look at every answer."""

from __future__ import annotations

from deepinfer_core.bench.results import BenchError
from deepinfer_core.engine.outputs import RequestHandle, RequestResult
from deepinfer_core.llm import LLM
from deepinfer_core.quantize.perplexity import public_domain_text
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.tokenizer import Tokenizer

PARAGRAPH = (
    "A lighthouse keeper writes down the weather four times a day. The wind, the sea, the light and the ships all "
    "have a column of their own.\n"
)
"""What the long prompt of `bench jitter` repeats."""

STEP = 977
"""Characters between the starts of two prompts in the text: a prime, so that they fall anywhere in a sentence."""

TIE = {"float32": 0.05}
TIE_HALF = 0.5
"""How near two logits must be for either to be a right greedy answer, in float32 and in the 16-bit types: kernels of
different row counts add up in different orders."""


def passage(tokenizer: Tokenizer, name: str, index: int, tokens: int) -> list[int]:
    """Return a prompt of exactly so many tokens: ordinary prose from a place of its own, behind a name of its own.

    Prompts of different names begin differently: none finds a page of another in the prefix cache.
    """
    text = public_domain_text()
    start = index * STEP % len(text)
    prose = text[start:] + text[:start]
    wanted = 8 * tokens
    while len(ids := tokenizer.encode(f"{name}: " + (prose * (wanted // len(prose) + 1))[:wanted])) < tokens:
        wanted *= 2
    return ids[:tokens]


def repeated(tokenizer: Tokenizer, name: str, times: int) -> list[int]:
    """Return the prompt of a paragraph so many times over."""
    return tokenizer.encode(f"{name}: " + PARAGRAPH * times)


def greedy(new_tokens: int) -> SamplingParams:
    """Return parameters that generate exactly so many tokens, always the likeliest."""
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


class Answers:
    """Checks what a bench generated: the right number of tokens, and the same text whatever the engine did.

    Greedy answers of one prompt may part only where the model finds two tokens as likely (`TIE`); under
    ``batch_invariant`` nowhere.

    Args:
        llm: The model, asked about the place where two answers part.
    """

    def __init__(self, llm: LLM) -> None:
        running = llm.running
        exact = running.place.dtype_name in TIE and running.attention.problem.kv_dtype != "int8"
        self._tie = 0.0 if running.config.batch_invariant else TIE[running.place.dtype_name] if exact else TIE_HALF
        self._llm = llm
        self._first: dict[tuple[int, ...], tuple[int, ...]] = {}

    def check(self, handle: RequestHandle, new_tokens: int, what: str) -> bool:
        """Look at a finished request; returns whether its text differs from the first one of this prompt.

        Raises:
            BenchError: It failed, ended early, or differs where the model was certain.
        """
        try:
            result = handle.result(0)
        except Exception as error:
            raise BenchError(f"{what}: request {handle.id} failed: {error}") from error
        if result.finish_reason != "length" or len(result.token_ids) != new_tokens:
            raise BenchError(
                f"{what}: request {handle.id} ended with {result.finish_reason!r} after "
                f"{len(result.token_ids)} tokens; {new_tokens} were asked for"
            )
        return self._differs(result, what)

    def _differs(self, result: RequestResult, what: str) -> bool:
        first = self._first.setdefault(result.prompt_ids, result.token_ids)
        if first == result.token_ids:
            return False
        pairs = zip(first, result.token_ids, strict=False)
        part = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if part is None:  # one was asked for more tokens
            return False
        logits = self._llm.logits([*result.prompt_ids, *first[:part]])[-1]
        two = logits[[first[part], result.token_ids[part]]]
        gap = float(logits.max() - two.min())
        if gap > self._tie:
            raise BenchError(
                f"{what}: request {result.id} answers {result.token_ids[part]} at token {part} where "
                f"{first[part]} came before; the model puts them {gap:.3f} apart, and rounding explains {self._tie}"
            )
        return True
