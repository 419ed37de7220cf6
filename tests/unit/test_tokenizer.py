"""Streaming text, end tokens and chat templates, on small tokenizers made here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from deepinfer_core.engine.detokenize import Detokenizer
from deepinfer_core.errors import CheckpointError, RequestError
from deepinfer_core.tokenizer import Tokenizer, load_tokenizer

END = "<|im_end|>"
TEXTS = ["a👨‍👩 猫é", " leading x", "a  b", "  two", "plain", "1\n\n2 ", "mixed 猫 and text 👍🏽!"]


def _byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, as the byte-level ones of Llama 3, Qwen and SmolLM are at their base."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END)


def _sentence_piece_like() -> PreTrainedTokenizerFast:
    """Return a tokenizer with visible spaces, byte fallback and a decoder that strips the first space (Llama 2)."""
    pieces = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], "▁", *"abcdefghijklmnopqrstuvwxyz12!"]
    raw = RawTokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END)


@pytest.fixture(params=[_byte_level, _sentence_piece_like], ids=["byte-level", "sentencepiece-like"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(request.param())


def _stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = Detokenizer(tokenizer)
    return [*[decoder.push(i) for i in ids], decoder.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_stream_is_the_whole_text_with_its_spaces(tokenizer: Tokenizer, text: str) -> None:
    pieces = _stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_character_cut_off_at_the_end_gives_one_replacement(tokenizer: Tokenizer, cut: int) -> None:
    ids = tokenizer.encode("ok 👨")
    assert "".join(_stream(tokenizer, ids[:-cut])) == "ok \ufffd"


def test_bytes_that_are_no_character_do_not_hold_the_stream_for_ever(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode("é")[0]
    decoder = Detokenizer(tokenizer)
    shown = "".join(decoder.push(lead) for _ in range(100))
    assert "\ufffd" in shown


def test_end_token_is_not_shown(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_ids
    assert "".join(_stream(tokenizer, [*tokenizer.encode("hi"), end])) == "hi"


def test_own_end_token_joins_the_union(tokenizer: Tokenizer) -> None:
    own = tokenizer.encode(END)[-1]
    assert Tokenizer(tokenizer._hf, {0, 2}).eos_ids == {0, 2, own}


def _with_template(template: str) -> Tokenizer:
    hf = _byte_level()
    hf.chat_template = template
    return Tokenizer(hf)


def test_chat_template_makes_the_prompt() -> None:
    chat = _with_template("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}>")
    assert chat.chat([{"role": "user", "content": "hi"}]) == "[user] hi\n>"


def test_chat_template_that_refuses_is_an_error_with_its_words() -> None:
    chat = _with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        chat.chat([{"role": "user", "content": "hi"}])


def test_chat_template_cannot_reach_the_system(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    escape = (
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == 'Popen' %}"
        f"{{{{ c('touch {target}', shell=True) }}}}{{% endif %}}{{% endfor %}}"
    )
    with pytest.raises(RequestError, match="refused the messages"):
        _with_template(escape).chat([{"role": "user", "content": "hi"}])
    assert not target.exists()


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "no role"}]])
def test_messages_of_another_form_are_refused(messages: list[Any]) -> None:
    with pytest.raises(RequestError, match="messages"):
        _with_template("{{ messages }}").chat(messages)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 12) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{{ 2.0 ** 100000 }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_whatever_a_template_raises_is_an_error_of_the_request(template: str, fault: str) -> None:
    with pytest.raises(RequestError, match=f"chat template failed on the messages: {fault}"):
        _with_template(template).chat([{"role": "user", "content": "x"}])


def test_a_prompt_of_undecodable_bytes_is_named(tokenizer: Tokenizer) -> None:
    text = b"ab\xff".decode("utf-8", errors="surrogateescape")  # how Python hands on such bytes of a command line
    with pytest.raises(RequestError, match=r"not valid Unicode: character 2 is '\\udcff'"):
        tokenizer.encode(text)


def test_model_without_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(_byte_level()).chat([{"role": "user", "content": "hi"}])


def _source(path: Path, eos: frozenset[int] = frozenset()) -> Any:
    return SimpleNamespace(tokenizer_path=path, tokenizer_gguf=None, eos_token_ids=lambda: eos)


def test_saved_tokenizer_loads_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(_source(tmp_path, frozenset({3})))
    assert loaded.eos_ids == tokenizer.eos_ids | {3}
    assert [loaded.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]


def test_repository_code_of_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    (tmp_path / "tok.py").write_text(f"open({str(target)!r}, 'w')\nclass Tok: pass\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tok.Tok", null]}}')
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "tok.Tok"}, "model_type": "odd"}')
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        load_tokenizer(_source(tmp_path))
    assert not target.exists()


def test_missing_directory_and_cut_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        load_tokenizer(_source(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"none of tokenizer\.json, .* is there; copy the model's own"):
        load_tokenizer(_source(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        load_tokenizer(_source(tmp_path))
