"""The command line as a user meets it: text on stdout, reasons on stderr, exit codes, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_core.cli.main import main


def _generate(model: Path | str, *flags: str) -> int:
    return main(["generate", str(model), "--device", "cpu", "--max-tokens", "8", "--ignore-eos", *flags])


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("deepinfer 0.")
    assert main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out


def test_answer_is_on_stdout_and_times_on_stderr(tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(tiny_chat_model, "--prompt", "Hello") == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert re.search(r"\[5 prompt \+ 8 tokens, length; TTFT [\d.]+ ms; TPOT [\d.]+ ms = [\d.]+ tokens/s\]", err)


def test_several_prompts_are_answered_in_order(tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(tiny_chat_model, "--chat", "--prompt", "first", "--prompt", "second") == 0
    out = capsys.readouterr().out
    assert out.index("> first") < out.index("> second")


def test_every_config_key_is_a_flag(tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cache.page_size", "4", "--attention.backend=sdpa", "--set", "scheduler.max_requests=3"]
    assert _generate(tiny_chat_model, "--prompt", "Hello", *flags) == 0
    with_flags = capsys.readouterr().out
    assert _generate(tiny_chat_model, "--prompt", "Hello") == 0
    assert capsys.readouterr().out == with_flags


def test_config_file_selects_by_name(tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "deepinfer.toml"
    config.write_text(
        f'model = "{tiny_chat_model.as_posix()}"\ndevice = "cpu"\n[linear.fp16]\nbackend = "fp16"\n'
        '[attention]\nbackend = "sdpa"\n[cache]\nmax_model_len = 64\nmemory = "1MiB"\n'
    )
    assert main(["--verbose", "generate", "--config", str(config), "--prompt", "Hello", "--max-tokens", "4"]) == 0
    err = capsys.readouterr().err
    assert "fp16.matmul_cpu" in err
    assert "attention sdpa" in err
    assert "max_model_len 64" in err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--prompt", "x", "--policy", "slow"], 4, "slow"),
        (["--prompt", "x", "--attention.backend", "sdpaa"], 4, "did you mean 'sdpa'"),
        (["--prompt", "x", "--cache.page_sise", "4"], 2, "page_size"),
        (["--prompt", "x", "--set", "nonsense"], 2, "KEY=VALUE"),
        (["--prompt", "x", "--cache.page_size"], 2, "needs a value"),
        (["--prompt", "x", "--backend", "fp16"], 2, "SCHEME=NAME"),
        (["--prompt", "x", "--backend", "fp16=acme"], 4, "acme"),
        (["--prompt", "x", "--temperature", "-1"], 2, "temperature = -1.0"),
        (["--prompt", "x", "--max-tokens", "0"], 2, "--max-tokens"),
        (["--prompt", "x" * 300], 7, "max_model_len is 256"),
        (["--prompt", "x", "--system", "y"], 2, "--system needs --chat"),
        ([], 2, "give --prompt"),
        (["--prompt", "x", "--no-such-flag"], 2, "no-such-flag"),
    ],
)
def test_mistake_is_one_clear_text_and_an_exit_code(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, message: str
) -> None:
    assert main(["generate", str(tiny_chat_model), "--device", "cpu", *flags]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [["config", "show"], ["plugins", "list"]])
def test_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deepinfer_core", *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no/such/model", "--prompt", "x"]) == 5
    assert "no/such/model does not exist" in capsys.readouterr().err.replace("\\", "/")


def test_module_form_is_the_same_command(tiny_chat_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_core", "generate", str(tiny_chat_model), "-p", "x", "--max-tokens", "3"],
        capture_output=True, text=True, encoding="utf-8", timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a console's Ctrl-C cannot be sent to one child on Windows")
def test_ctrl_c_ends_a_generation_with_130(tiny_chat_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer_core", "generate", str(tiny_chat_model), "--device", "cpu", "--ignore-eos",
         "--max-model-len", "256", "--max-tokens", "250", *["--prompt", "Hello"] * 200],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1), "the first answer has begun"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert err.endswith(b"interrupted\n")
