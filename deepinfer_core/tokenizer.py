"""Text to token ids and back; the only module that imports transformers, and only when a tokenizer is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from deepinfer_core.errors import CheckpointError, RequestError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

REPLACEMENT = "\ufffd"
"""What decoders give for bytes that are no character, so also for the first bytes of one."""

Message = Mapping[str, Any]


class TokenizerSource(Protocol):
    """What is asked of a checkpoint."""

    @property
    def tokenizer_path(self) -> Path:
        """Directory with the tokenizer's files, or with the GGUF file that holds it."""
        ...

    @property
    def tokenizer_gguf(self) -> str | None:
        """Name of the GGUF file in that directory, None when there are tokenizer files."""
        ...

    def eos_token_ids(self) -> frozenset[int]:
        """Return the end tokens of config.json and generation_config.json together."""
        ...


class Tokenizer:
    """A model's tokenizer with its chat template and the union of its end tokens.

    Attributes:
        eos_ids: Tokens that end a generation: those of config.json, generation_config.json and the tokenizer together.
    """

    def __init__(self, hf: Any, eos_ids: Iterable[int] = ()) -> None:
        self._hf = hf
        own = hf.eos_token_id
        self.eos_ids = frozenset(eos_ids) | (frozenset() if own is None else frozenset({int(own)}))
        self._anchor, self._anchor_text = self._find_anchor()

    @property
    def has_chat_template(self) -> bool:
        """True when `chat` can be used."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text; with ``special``, with the start token that the model was trained with.

        Raises:
            RequestError: The text is no Unicode text: it holds lone surrogates, which stand for undecodable bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: character {error.start} is {text[error.start]!a}; was it UTF-8?"
            ) from error
        return [int(t) for t in self._hf.encode(text, add_special_tokens=special)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids as they continue another text: a leading space is kept."""
        text = self._raw([*self._anchor, *ids], skip_special=skip_special)
        return text[len(self._anchor_text) :]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for, also where they are a part of a character alone."""
        text = self.decode([token], skip_special=False)
        if REPLACEMENT not in text:
            return text.encode("utf-8", "replace")
        piece = str(self._hf.convert_ids_to_tokens(token))
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        table = _byte_alphabet()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else text.encode()

    def fast_json(self) -> str | None:
        """Return the tokenizer as the JSON of the tokenizers library, without padding and truncation; None without."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            return None
        data = json.loads(backend.to_str())
        data["padding"] = data["truncation"] = None
        return json.dumps(data)

    @property
    def template_text(self) -> str:
        """The chat template's source; empty when there is none. Where there are several, the one for tools is first."""
        template = self._hf.chat_template
        if isinstance(template, Mapping):
            return "\n".join(str(template[name]) for name in sorted(template, key=lambda name: name != "tool_use"))
        return str(template or "")

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt that the model's chat template makes of messages, in transformers' sandbox.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order.
            add_generation_prompt: End with the opening of the assistant's turn.
            **variables: Further variables of the template, such as ``enable_thinking``.

        Raises:
            RequestError: The model has no template, or the template refused the messages.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use a plain prompt instead of messages")
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{i}] = {message!r}: it must be a map with role and content")
        import jinja2

        try:
            text = self._hf.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=add_generation_prompt, tokenize=False, **variables
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refused the messages: {error}") from error
        except Exception as error:  # the template is the model's code: a division by zero, endless recursion, ...
            raise RequestError(
                f"the model's chat template failed on the messages: {type(error).__name__}: {error}"
            ) from error
        return str(text)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of `chat`; the template writes the special tokens itself."""
        return self.encode(self.chat(messages, **variables), special=False)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and what belongs to it; loading those takes a tenth of the time that a GGUF takes."""
        self._hf.save_pretrained(str(directory))

    def _raw(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._hf.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def _find_anchor(self) -> tuple[list[int], str]:
        """Find a visible token to put before what is decoded: SentencePiece decoders strip the text's first space."""
        for text in ("a", "A", "0"):
            ids = self.encode(text, special=False)[-1:]
            shown = self._raw(ids, skip_special=True)
            if shown.strip() and REPLACEMENT not in shown:
                return ids, shown
        return [], ""


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Load a checkpoint's tokenizer from its own files; nothing is fetched and no code of the model is run.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    path = Path(source.tokenizer_path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such directory to load a tokenizer from")
    try:
        hf = _load_gguf(path, source.tokenizer_gguf) if source.tokenizer_gguf else _load_files(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        present = source.tokenizer_gguf or any((path / name).is_file() for name in _TOKENIZER_FILES)
        fault = error if present else f"none of {', '.join(_TOKENIZER_FILES)} is there; copy the model's own"
        raise CheckpointError(f"{path}: the tokenizer cannot be read: {fault}") from error
    return Tokenizer(hf, source.eos_token_ids())


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for: printable Latin-1 for itself."""
    shown = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD)]
    table = {chr(b): b for b in shown}
    hidden = (b for b in range(256) if b not in shown)
    return table | {chr(256 + i): b for i, b in enumerate(hidden)}


def _load_files(path: Path) -> Any:
    if (path / "tokenizer.json").is_file():
        # The file says everything; the class for it imports in a third of the time that AutoTokenizer takes.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _load_gguf(path: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(path), gguf_file=name, local_files_only=True, trust_remote_code=False)
    if _gguf_pre_tokenizer(path / name) == "smollm":
        # SmolLM splits digits off before anything else; transformers 5.24 does not know this GGUF value.
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        hf.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    return hf


def _gguf_pre_tokenizer(path: Path) -> str | None:
    from gguf import GGUFReader

    value = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return None if value is None else str(value.contents())
