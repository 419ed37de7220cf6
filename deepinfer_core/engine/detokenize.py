"""From tokens to the text of an answer, piece by piece: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
"""What decoders give for bytes that are no character; at the end, for the first bytes of one."""

WINDOW = 8
"""Tokens that are decoded together before the window moves on: longer repeats work, shorter decodes twice as often."""

LONG_WINDOW = 64
"""Where it moves on although the last bytes are no character yet: they hardly ever will be."""

CUT_BYTES = 3
"""Most bytes of a character that is not complete: so many replacements at the end may still become one."""


class Decodes(Protocol):
    """What is asked of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids."""
        ...


class Detokenizer:
    """Decodes one answer token by token; joined pieces equal ``decode`` of all its tokens.

    New tokens are decoded behind some that are shown already, so that a decoder which strips the first space of what it
    is given (SentencePiece's) strips the answer's first alone. Once a token shows its first space with none before it,
    the decoder is known not to strip, and each token is decoded by itself.

    Args:
        tokenizer: Decodes ids.
        context: The last tokens of the prompt, for the answer's own first space to be kept; none to have it as the
            decoder gives it.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._alone = False  # whether the first space of what is decoded is known to be kept
        self._held = 0
        self._window: list[int] = []
        self._shown = self._whole_text = ""  # what of the window's text is shown; what was when last all of it was
        self._whole = 0  # tokens of the window when last all was shown
        before = tokenizer.decode(context) if context else ""
        cut = REPLACEMENT in before  # a prompt that ends within a character: its bytes are no part of the answer
        if not cut:
            self._show_from(list(context), before)

    def push(self, token: int) -> str:
        """Take the next token; return the text that became certain."""
        self._window.append(token)
        shown = self._shown
        text = self._tokenizer.decode(self._window)
        if not text.startswith(shown):
            # Byte fallback gives up a whole run of bytes for one character that is not complete: leave the others out.
            text = self._whole_text + self._tokenizer.decode(self._window[self._whole :])
        self._held = _cut_tail(text, len(shown))
        piece = text[len(shown) : len(text) - self._held]
        self._shown = shown + piece
        if not self._held:
            if not self._alone and piece.startswith(" ") and len(self._window) == self._whole + 1:
                self._alone = self._tokenizer.decode([token]) == piece
            self._whole, self._whole_text = len(self._window), self._shown
        if self._alone and not self._held:
            self._show_from([])
        elif len(self._window) >= (LONG_WINDOW if self._held else WINDOW):
            self._move_on()
        return piece

    def finish(self) -> str:
        """Return what the end makes certain: one replacement character for a character that was cut off, or nothing."""
        held, self._held = self._held, 0
        return REPLACEMENT if held else ""

    def _show_from(self, window: list[int], shown: str = "") -> None:
        """Decode behind these tokens from now on, all of whose text is shown."""
        self._window, self._shown = window, shown
        self._whole, self._whole_text = len(window), shown

    def _move_on(self) -> None:
        """Start the window at the latest token from which on the end of the shown text is decoded all the same."""
        for start in range(len(self._window) - 1, 0, -1):
            text = self._tokenizer.decode(self._window[start:])
            shown = text[: max(0, len(text) - self._held)]
            if shown.strip() and self._shown.endswith(shown):
                self._show_from(self._window[start:], shown)
                if self._held:
                    self._whole, self._whole_text = 0, ""
                return


def _cut_tail(text: str, shown: int) -> int:
    """Return how many characters at the end may be the bytes of one that is not complete."""
    held = 0
    while held < CUT_BYTES and len(text) - held > shown and text[len(text) - held - 1] == REPLACEMENT:
        held += 1
    return held


class StopStrings:
    """Holds back text that may be the beginning of a stop string, and cuts at the first one that is complete.

    The first is the one that ends first, as if text came character by character; so the cut does not depend on how the
    text was cut into tokens.

    Attributes:
        found: The stop string that was found; None before.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what is certain to be shown: nothing more once a stop was found."""
        if self.found is not None or not text:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        keep = next((k for k in range(min(len(text), self._longest - 1), 0, -1) if self._begins(text[-k:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _begins(self, tail: str) -> bool:
        return any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops)


class TextStream:
    """The text of one answer. End tokens are not pushed; without a tokenizer the text is empty.

    Streaming and non-streaming answers both come from here, so that they are equal.

    Args:
        tokenizer: Decodes ids; None for answers in token ids alone.
        stop: Strings that end the answer and are not shown.
        min_tokens: Stop strings in the text of the tokens before this many are not looked for.
        context: The last tokens of the prompt, see `Detokenizer`.

    Attributes:
        text: All that was returned so far.
    """

    def __init__(
        self, tokenizer: Decodes | None, stop: Iterable[str] = (), min_tokens: int = 0, context: Sequence[int] = ()
    ) -> None:
        self._decoder = None if tokenizer is None else Detokenizer(tokenizer, context)
        self._stops = StopStrings(stop)
        self._unchecked = max(0, min_tokens - 1)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; the text ends before it."""
        return self._stops.found is not None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token: int) -> str:
        """Take the next token; return the text that became certain, possibly none."""
        if self._decoder is None or self.stopped:
            return ""
        piece = self._decoder.push(token)
        if self._unchecked:
            self._unchecked -= 1
        else:
            piece = self._stops.push(piece)
        return self._keep(piece)

    def finish(self) -> str:
        """Return the rest at the end of the answer, whatever ended it; after a stop string there is none."""
        if self._decoder is None or self.stopped:
            return ""
        piece = self._stops.push(self._decoder.finish())
        return self._keep(piece if self.stopped else piece + self._stops.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
