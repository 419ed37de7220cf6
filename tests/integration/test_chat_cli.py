"""``deepinfer chat``: piped, in a terminal, within the context, and stopped by Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from deepinfer_core.cli import chat
from deepinfer_core.cli.main import main
from deepinfer_core.errors import CapacityError
from deepinfer_core.llm import LLM
from deepinfer_core.sampling import SamplingParams

Piped = Callable[..., int]


@pytest.fixture
def piped(tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> Piped:
    """Run the command with lines on standard input."""

    def run(lines: str, *flags: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        base = ["chat", str(tiny_chat_model), "--device", "cpu", "--temperature", "0", "--max-tokens", "6"]
        return main([*base, *flags])

    return run


@pytest.fixture(scope="module")
def llm(tiny_chat_model: Path) -> LLM:
    return LLM(tiny_chat_model, device="cpu")


@pytest.fixture
def talk_to(llm: LLM) -> chat.Conversation:
    return chat.Conversation(llm, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))


def test_a_pipe_gets_the_answers_alone(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    assert piped("one\n\ntwo\n") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") >= 2
    assert ">" not in out.splitlines()[0][:1]
    assert "of context" not in err


def test_what_was_said_is_in_the_next_prompt(talk_to: chat.Conversation) -> None:
    said: list[str] = []
    talk_to.system = "S"
    talk_to.ask("first", said.append)
    talk_to.ask("second", said.append)
    roles = [m["role"] for m in talk_to.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert talk_to.messages[1]["content"] + talk_to.messages[3]["content"] == "".join(said)
    prompt = talk_to.llm.tokenizer.chat([{"role": "system", "content": "S"}, *talk_to.messages[:3]])
    expected = talk_to.llm.generate([talk_to.llm.tokenizer.encode(prompt, special=False)], talk_to.params)[0]
    assert expected.text == talk_to.messages[3]["content"]


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(talk_to: chat.Conversation) -> None:
    talk_to.system = "keep me"
    forgotten = [talk_to.ask("x" * 60, lambda _: None) for _ in range(6)]
    assert sum(forgotten) > 0
    assert all(count % 2 == 0 for count in forgotten), "whole turns"
    assert talk_to.context <= talk_to.limit == 256
    assert talk_to.messages[0]["role"] == "user"


def test_an_answer_is_cut_at_the_end_of_the_context(talk_to: chat.Conversation) -> None:
    talk_to.params = evolve(talk_to.params, max_tokens=1024)
    talk_to.ask("hi", lambda _: None)
    assert talk_to.context == talk_to.limit
    assert talk_to.last is not None
    assert talk_to.last[1] == "length"


def test_a_message_longer_than_the_context_is_refused_and_not_kept(talk_to: chat.Conversation) -> None:
    with pytest.raises(CapacityError, match="the context holds 256"):
        talk_to.ask("x" * 400, lambda _: None)
    assert talk_to.messages == []
    talk_to.ask("short", lambda _: None)
    assert len(talk_to.messages) == 2


def test_a_stopped_answer_is_kept_and_the_engine_goes_on(talk_to: chat.Conversation) -> None:
    talk_to.params = evolve(talk_to.params, max_tokens=200)
    count = 0

    def say(_: str) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk_to.ask("go", say)
    assert talk_to.messages[-1]["role"] == "assistant"
    talk_to.llm.running.cache.assert_no_leaks()
    talk_to.params = evolve(talk_to.params, max_tokens=3)
    talk_to.ask("again", lambda _: None)
    assert len(talk_to.messages) == 4


def test_commands(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "/help\n/system Be kind\nhello\n/stats\n/reset\n/stats\n/system\n/what\n/exit\nnever read\n"
    assert piped(lines) == 0
    out, err = capsys.readouterr()
    assert "/reset" in err
    assert "system: Be kind" in err
    assert "TPOT" in err
    assert "2 messages," in err
    assert "0 messages, 0 of 256 tokens" in err
    assert "there is no /what" in err
    assert len(out.splitlines()) >= 1
    assert "never" not in out + err


def test_a_backslash_continues_the_message(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    assert piped("a\\\nb\n/stats\n") == 0
    assert "2 messages," in capsys.readouterr().err


def test_a_mistake_in_a_pipe_is_an_exit_code(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    assert piped("x" * 400 + "\n") == 7
    assert "the context holds" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX's")
def test_ctrl_c_stops_the_answer_first_and_leaves_second(tiny_chat_model: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer_core", "chat", str(tiny_chat_model), "--device", "cpu", "--temperature", "1",
         "--seed", "1", "--max-tokens", "100000", "--set", "batch_invariant=true"],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    os.close(theirs)
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        assert b"tokens of context" in process.stderr.readline()
        for _ in range(8):  # an answer may end by itself before the signal comes
            os.write(ours, b"hello\n")
            assert process.stdout.read(8), "an answer has begun"
            process.send_signal(signal.SIGINT)
            line = process.stderr.readline()
            if b"stopped" in line:
                break
            time.sleep(0.05)
        assert b"stopped; Ctrl-C once more leaves" in line
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert err.endswith(b"interrupted\n")
