"""SamplingParams: what a caller may ask of one generation, checked when it is made and again against the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, fields, frozen

from deepinfer_core.errors import RequestError

if TYPE_CHECKING:
    from attrs import Attribute
    from torch import Tensor

GREEDY_BELOW = 1e-5
"""A temperature below this means the most likely token: dividing by it would only overflow."""

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BIAS = 100.0


class TokenConstraint(Protocol):
    """What limits one answer's tokens from outside, such as a grammar: the sampler asks it before each token.

    Only the scheduler thread calls it. What it allows must depend on the accepted tokens alone: a token that was drawn
    may be dropped (preemption, memory) and drawn again. It must always allow a token: an end token where nothing else
    may follow.
    """

    def allowed(self, vocab: int, /) -> Tensor:
        """Return which tokens may come next: bool ``[vocab]`` on the CPU."""
        ...

    def accept(self, token: int, /) -> None:
        """Take the token that the answer goes on with."""
        ...


_Validator = Callable[[Any, "Attribute[Any]", Any], None]


def _refuse(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name} = {value!r}: it must be {wanted}")


def _number(lo: float, hi: float, wanted: str, *, lo_open: bool = False) -> _Validator:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)  # no comparison holds for a NaN
        if not good or not (lo < value if lo_open else lo <= value) or not value <= hi:
            raise _refuse(attribute.name, value, wanted)

    return check


def _integer(lo: int, hi: int, wanted: str) -> _Validator:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not lo <= value <= hi:
            raise _refuse(attribute.name, value, wanted)

    return check


def _optional(inner: _Validator) -> _Validator:
    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is not None:
            inner(instance, attribute, value)

    return check


def _boolean(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(attribute.name, value, "true or false")


def _factory(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not callable(value):
        raise _refuse(attribute.name, value, "a function that returns a TokenConstraint")


def _as_tuple(value: Any) -> Any:
    """Make a tuple of a list, a tuple of one string, and leave what is neither for the validator to name."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _stop_strings(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(s, str) and s for s in value):
        raise _refuse(attribute.name, value, "a non-empty string or a list of them")


def _token_ids(_: Any, attribute: Attribute[Any], value: Any) -> None:
    good = isinstance(value, tuple) and all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in value)
    if not good:
        raise _refuse(attribute.name, value, "a list of token ids, each at least 0")


def _bias(value: Any) -> Any:
    """Turn JSON's string keys into token ids; what is no token id is named here."""
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", value, "a map from token id to bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdigit()):
            raise _refuse("logit_bias", key, "keyed by token ids, each at least 0")
        good = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not good or not abs(amount) <= MAX_BIAS:
            raise _refuse(f"logit_bias[{text}]", amount, f"a number from -{MAX_BIAS:g} to {MAX_BIAS:g}")
        bias[int(text)] = float(amount)
    return bias


@frozen(kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Every value is checked here; the model's own limits in `check_for`.

    Attributes:
        temperature: 0 (below 1e-5) takes the most likely token; 1 samples the model's own distribution.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: Drop tokens less likely than this times the most likely one; 0 drops none.
        presence_penalty: Subtracted from the logit of every token generated before.
        frequency_penalty: Subtracted once for each time that the token was generated.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen before; 1 is off.
        logit_bias: Token id -> amount added to its logit, -100 to 100.
        seed: Makes a sampled generation repeatable; None draws a fresh one.
        stop: Strings that end the generation and are not shown.
        stop_token_ids: Token ids that end it besides the model's own end tokens.
        ignore_eos: Go on after the model's end tokens.
        min_tokens: No end token ends the generation before this many.
        max_tokens: Most tokens to generate; None for what the model's length leaves, 0 to have the
            prompt read alone, for its log probabilities or the prefix cache.
        logprobs: Report the log probability of each token and of this many alternatives.
        prompt_logprobs: The same for the prompt.
        n: Independent answers to the same prompt.
        priority: Higher is more urgent, for policies that look at it.
        deadline_ms: When the answer should be complete, from submission, for policies that look at it.
        constraint: Makes, for each answer, what says which tokens may come next (a grammar).

    Raises:
        RequestError: A value is of the wrong type or out of its range; the message names field, value and range.
    """

    temperature: float = field(default=1.0, validator=_number(0, 100, "a number from 0 to 100"))
    top_k: int = field(default=0, validator=_integer(0, 1 << 31, "an integer from 0 (all tokens) to 2147483648"))
    top_p: float = field(default=1.0, validator=_number(0, 1, "above 0 and at most 1", lo_open=True))
    min_p: float = field(default=0.0, validator=_number(0, 1, "a number from 0 to 1"))
    presence_penalty: float = field(default=0.0, validator=_number(-2, 2, "a number from -2 to 2"))
    frequency_penalty: float = field(default=0.0, validator=_number(-2, 2, "a number from -2 to 2"))
    repetition_penalty: float = field(default=1.0, validator=_number(0, 100, "above 0 and at most 100", lo_open=True))
    logit_bias: Mapping[int, float] = field(factory=dict, converter=_bias)
    seed: int | None = field(default=None, validator=_optional(_integer(-(1 << 63), (1 << 63) - 1, "a 64-bit integer")))
    stop: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_stop_strings)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_as_tuple, validator=_token_ids)
    ignore_eos: bool = field(default=False, validator=_boolean)
    min_tokens: int = field(default=0, validator=_integer(0, 1 << 31, "an integer, at least 0"))
    max_tokens: int | None = field(
        default=None, validator=_optional(_integer(0, 1 << 31, "an integer from 0 to 2147483648"))
    )
    logprobs: int | None = field(
        default=None, validator=_optional(_integer(0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"))
    )
    prompt_logprobs: int | None = field(
        default=None, validator=_optional(_integer(0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"))
    )
    n: int = field(default=1, validator=_integer(1, MAX_N, f"an integer from 1 to {MAX_N}"))
    priority: int = field(default=0, validator=_integer(-(1 << 31), 1 << 31, "an integer"))
    deadline_ms: float | None = field(default=None, validator=_optional(_number(0, 1e12, "above 0", lo_open=True)))
    constraint: Callable[[], TokenConstraint] | None = field(default=None, validator=_optional(_factory))

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def check_for(self, vocab_size: int) -> None:
        """Check token ids against a model's vocabulary, before the request is admitted.

        Raises:
            RequestError: An id of `logit_bias` or `stop_token_ids` is not in the vocabulary.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise _refuse(name, token, f"a token id below the model's vocabulary of {vocab_size}")

    def changed(self) -> dict[str, object]:
        """Return the fields that differ from their defaults."""
        default = SamplingParams()
        return {
            a.name: getattr(self, a.name)
            for a in fields(SamplingParams)
            if getattr(self, a.name) != getattr(default, a.name)
        }
