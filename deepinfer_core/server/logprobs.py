"""Log probabilities as OpenAI's two routes write them, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from deepinfer_core.engine.outputs import TokenScore
from deepinfer_core.tokenizer import Tokenizer

LOWEST = -9999.0
"""What stands for the logarithm of zero: JSON has no infinity."""


class TokenTexts:
    """How single tokens are shown; remembers the latest ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes_of = lru_cache(maxsize=1 << 15)(tokenizer.token_bytes)

    def shown(self, token: int) -> str:
        r"""Return a token's text; what is no whole character as ``bytes:\xe7``, as OpenAI does."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """Builds ``logprobs`` of `/v1/completions` for one choice, piece by piece.

    Args:
        texts: How tokens are shown.
        before: Characters of the choice's text before the first generated token: the echoed prompt's.
    """

    def __init__(self, texts: TokenTexts, before: int = 0) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = before

    def prompt(self, text: str, tokens: Sequence[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        """Return the entries of an echoed prompt; its first token has no probability."""
        scored = [*scores, *[None] * (len(tokens) - len(scores))]
        offsets = _prompt_offsets(text, [self._texts.bytes_of(token) for token in tokens])
        return self._entries(tokens, scored, offsets)

    def answer(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """Return the entries of generated tokens; each offset is where the token's first whole character begins."""
        offsets = []
        for score in scores:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.bytes_of(score.token)))
        return self._entries([score.token for score in scores], scores, offsets)

    def _entries(
        self, tokens: Sequence[int], scores: Sequence[TokenScore | None], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._texts.shown(token) for token in tokens],
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
            "top_logprobs": [None if score is None else self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        top = {self._texts.shown(token): _finite(logprob) for token, logprob in reversed(score.top)}
        top[self._texts.shown(score.token)] = _finite(score.logprob)
        return top


def _prompt_offsets(text: str, tokens: Sequence[bytes]) -> list[int]:
    """Return where in its text each token of a prompt begins.

    At the start, a token that the text does not begin with was put there by the tokenizer (a start token) and has no
    width; of one that does but for its space, the space was (SentencePiece's).
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, position = [], 0
    for raw in tokens:
        offsets.append(min(position, len(text)))
        if not position:
            piece = raw.decode("utf-8", "ignore")
            if raw.startswith(b" ") and not text.startswith(piece):
                raw, piece = raw[1:], piece[1:]
            if not text.startswith(piece):
                continue
        position += len(decoder.decode(raw))
    return offsets


def chat_logprobs(texts: TokenTexts, scores: Iterable[TokenScore]) -> dict[str, Any]:
    """Return ``logprobs`` of `/v1/chat/completions` for some tokens."""
    content = [
        {
            **_token(texts, score.token, score.logprob),
            "top_logprobs": [_token(texts, token, logprob) for token, logprob in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _token(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.shown(token), "logprob": _finite(logprob), "bytes": list(texts.bytes_of(token))}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
