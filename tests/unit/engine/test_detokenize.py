"""Incremental text: whole characters, leading spaces, and stop strings that never leak."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.engine.detokenize import REPLACEMENT, Detokenizer, StopStrings, TextStream


class _Bytes:
    """A byte-level tokenizer: ids below 256 are bytes, later ones the given byte strings."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def decode(self, ids: Sequence[int], /) -> str:
        return b"".join(bytes([i]) if i < 256 else self._pieces[i - 256] for i in ids).decode("utf-8", "replace")


class _Pieces:
    """SentencePiece-like: "▁" is a space, the first of a text is dropped; negative ids are bytes, -1 is special.

    Like byte fallback of the tokenizers library, each byte of an incomplete character gives one replacement.
    """

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def decode(self, ids: Sequence[int], /) -> str:
        text, pending = "", b""
        for i in [*ids, None]:
            if i is not None and i < -1:
                pending += bytes([-i - 2])
                continue
            try:
                text += pending.decode("utf-8")
            except UnicodeDecodeError:
                text += REPLACEMENT * len(pending)
            pending = b""
            if i is not None and i >= 0:
                text += self._pieces[i]
        return text.replace("▁", " ").removeprefix(" ")


def _byte_ids(text: str) -> list[int]:
    return [-b - 2 for b in text.encode()]


def _stream(decoder: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(i) for i in ids), decoder.finish()]


EMOJI = "a👨‍👩 猫é"


def test_characters_come_whole() -> None:
    pieces = _stream(Detokenizer(_Bytes()), list(EMOJI.encode()))
    assert "".join(pieces) == EMOJI
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_the_same_from_byte_fallback() -> None:
    pieces = _stream(Detokenizer(_Pieces()), _byte_ids(EMOJI))
    assert "".join(pieces) == EMOJI


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_cut_character_gives_one_replacement_at_the_end(cut: int, fallback: bool) -> None:
    data = "ok 👨".encode()[: 3 + cut]
    ids = [-b - 2 for b in data] if fallback else list(data)
    pieces = _stream(Detokenizer(_Pieces() if fallback else _Bytes()), ids)
    assert "".join(pieces) == "ok " + REPLACEMENT
    assert pieces[-1] == REPLACEMENT


def test_text_before_the_bytes_of_one_token_is_shown_at_once() -> None:
    decoder = Detokenizer(_Bytes("né".encode()[:2], "é!".encode()[1:]))
    assert decoder.push(256) == "n"
    assert decoder.push(257) == "é!"


def test_wrong_bytes_in_the_middle_are_shown_as_a_whole_decode_shows_them() -> None:
    data = b"a\xf0\x9fb\x80\x80\x80\x80\x80\x80c"
    pieces = _stream(Detokenizer(_Bytes()), list(data))
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_a_long_run_of_wrong_bytes_is_not_held_back() -> None:
    decoder = Detokenizer(_Bytes())
    shown = "".join(decoder.push(0x80) for _ in range(500))
    assert len(shown) == 497
    assert decoder.push(0x41) == REPLACEMENT * 3 + "A"


def test_a_real_replacement_character_is_shown_with_what_follows() -> None:
    ids = list(f"x{REPLACEMENT}y".encode())
    assert "".join(_stream(Detokenizer(_Bytes()), ids)) == f"x{REPLACEMENT}y"
    assert "".join(_stream(Detokenizer(_Bytes()), ids[:-1])) == f"x{REPLACEMENT}"


def test_spaces_are_kept_by_a_byte_level_decoder() -> None:
    for text in (" leading x", "a  b", "  ", "a "):
        assert "".join(_stream(Detokenizer(_Bytes()), list(text.encode()))) == text


def test_spaces_are_kept_by_a_stripping_decoder() -> None:
    tokenizer = _Pieces("▁leading", "▁x", "a", "▁", "▁b", ":")
    assert "".join(_stream(Detokenizer(tokenizer), [0, 1])) == "leading x" == tokenizer.decode([0, 1])
    assert "".join(_stream(Detokenizer(tokenizer, context=[5]), [0, 1])) == " leading x"
    assert "".join(_stream(Detokenizer(tokenizer), [2, 3, 4])) == "a  b"
    assert "".join(_stream(Detokenizer(tokenizer), [2, *[3] * 30, 4])) == "a" + " " * 31 + "b"


@pytest.mark.parametrize(("strips", "longest"), [(False, 1), (True, 8)])
def test_tokens_are_decoded_by_themselves_where_first_spaces_are_kept(strips: bool, longest: int) -> None:
    lengths: list[int] = []

    class Recording(_Bytes):
        def decode(self, ids: Sequence[int], /) -> str:
            lengths.append(len(ids))
            text = super().decode(ids)
            return text.removeprefix(" ") if strips else text

    decoder = Detokenizer(Recording(b"a", b" b"))
    pieces = [decoder.push(256 + (i % 2)) for i in range(50)]
    assert "".join(pieces) == "a b" * 25
    assert max(lengths[6:]) == longest


def test_a_special_token_in_the_middle_does_not_eat_the_next_space() -> None:
    tokenizer = _Pieces("▁x")
    ids = [0] + [-1] * 20 + [0] * 20
    assert "".join(_stream(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


@given(st.lists(st.sampled_from(["a", "▁b", "▁", "é", "👨", "-"]), max_size=40), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_pieces_joined_are_the_text_whatever_the_tokens(words: list[str], cut: int) -> None:
    tokenizer = _Pieces("a", "▁b", "▁")
    ids: list[int] = []
    for word in words:
        plain = ("a", "▁b", "▁")
        ids += [plain.index(word)] if word in plain else [-1] if word == "-" else _byte_ids(word)
    ids += _byte_ids("👨")[:cut]
    text = "".join(words).replace("-", "").replace("▁", " ").removeprefix(" ")
    assert "".join(_stream(Detokenizer(tokenizer), ids)) == text + (REPLACEMENT if cut else "")


@given(st.binary(max_size=60) | st.text("aé👨 ", max_size=30).map(str.encode))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_shown_as_a_whole_decode_shows_them(data: bytes) -> None:
    whole = data.decode("utf-8", "replace")
    cut = min(len(whole) - len(whole.rstrip(REPLACEMENT)), 3)  # the last bytes may have been one character
    assert "".join(_stream(Detokenizer(_Bytes()), list(data))) == whole[: len(whole) - cut] + REPLACEMENT * bool(cut)


def _stops(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.finish()], matcher.found


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["\nQ7:"], ["hi", "\nQ", "7:"], "hi", "\nQ7:"),
        (["ta ga"], ["alpha", " be", "ta", " ga", "mma"], "alpha be", "ta ga"),
        (["ta ga"], ["alpha beta gamma"], "alpha be", "ta ga"),
        (["ab", "abc"], ["x", "a", "b", "c"], "x", "ab"),
        (["ab", "abc"], ["xabc"], "x", "ab"),
        (["abc", "ab"], ["xabc"], "x", "ab"),
        (["bcd", "c"], ["abcd"], "ab", "c"),
        (["bcd", "c"], ["a", "b", "c", "d"], "ab", "c"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["stop"], ["st", "op"], "", "stop"),
        (["stop"], ["s", "t", "o"], "sto", None),
        ([], ["any", "thing"], "anything", None),
    ],
)
def test_text_ends_before_the_stop(stops: list[str], pieces: list[str], shown: str, found: str | None) -> None:
    parts, which = _stops(stops, pieces)
    assert "".join(parts) == shown
    assert which == found


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("abc", max_size=30),
    st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_the_cut_never_depends_on_the_pieces_and_no_part_of_the_stop_leaks(
    stops: list[str], text: str, sizes: list[int]
) -> None:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    by_pieces, found = _stops(stops, pieces)
    by_characters, same = _stops(stops, list(text))
    assert "".join(by_pieces) == "".join(by_characters)
    assert found == same
    assert text.startswith("".join(by_pieces))
    assert (found is None) == all(stop not in text for stop in stops)


def _text(stream: TextStream, ids: Sequence[int]) -> str:
    pieces = [*(stream.push(i) for i in ids), stream.finish()]
    assert "".join(pieces) == stream.text
    return stream.text


def test_a_stream_stops_and_then_stays_silent() -> None:
    stream = TextStream(_Bytes(), stop=["ta ga"])
    assert _text(stream, list(b"alpha beta gamma")) == "alpha be"
    assert stream.stopped
    assert stream.stop_reason == "ta ga"
    assert stream.push(65) == stream.finish() == ""


def test_a_stop_with_wide_characters_is_found_across_their_bytes() -> None:
    stream = TextStream(_Bytes(), stop=["猫é"])
    assert _text(stream, list(EMOJI.encode())) == "a👨‍👩 "
    assert stream.stopped


def test_a_held_beginning_and_a_cut_character_come_at_the_end() -> None:
    stream = TextStream(_Bytes(), stop=["stop"])
    assert _text(stream, list(b"a sto" + "é".encode()[:1])) == "a sto" + REPLACEMENT
    assert not stream.stopped


def test_stop_strings_before_min_tokens_are_shown() -> None:
    stream = TextStream(_Bytes(), stop=["x"], min_tokens=4)
    assert _text(stream, list(b"axbcxd")) == "axbc"
    first = TextStream(_Bytes(), stop=["x"], min_tokens=1)
    assert _text(first, list(b"xa")) == ""


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert _text(TextStream(None, stop=["x"]), [1, 2, 3]) == ""
