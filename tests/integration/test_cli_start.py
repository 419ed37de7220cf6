"""How the command line begins: Ctrl-C during imports, completion, help that a newcomer can act on, traces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_core.cli.main import COMMANDS, main
from deepinfer_core.cli.options import config_keys

INTERRUPTED_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
            try:
                for _ in range(1000):
                    pass  # the handler runs here
            except KeyboardInterrupt:
                if "FAIL" in os.environ:
                    raise ImportError("half loaded") from None
                raise

sys.meta_path.insert(0, Interrupt())
from deepinfer_core.cli.entry import main
sys.exit(main())
"""


def _interrupted(module: str, *argv: str, **more: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, *argv], env=os.environ | {"INTERRUPT_AT": module, **more},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be raised by os.kill on Windows")
@pytest.mark.parametrize("module", ["typer", "deepinfer_core.config", "rich.table"])
def test_ctrl_c_during_an_import_is_130_and_one_word(module: str) -> None:
    assert _interrupted(module, "plugins", "list") == (130, "", "interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be raised by os.kill on Windows")
@pytest.mark.parametrize("module", ["torch", "deepinfer_core.llm"])
@pytest.mark.parametrize("more", [{}, {"FAIL": "yes"}])
def test_ctrl_c_while_a_command_imports_is_130_whatever_the_import_makes_of_it(
    tiny_chat_model: Path, module: str, more: dict[str, str]
) -> None:
    assert _interrupted(module, "generate", str(tiny_chat_model), "-p", "x", **more) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("deepinfer ", 1, {"generate", "chat", "serve", "plan", "eval"}),
        ("deepinfer ser", 1, {"serve"}),
        ("deepinfer serve --no-pre", 2, {"--no-prefill-decode-overlap"}),
        ("deepinfer generate --policy ", 3, {"auto", "mixed", "dual_stream", "serial", "slo", "time_sliced"}),
        ("deepinfer chat --dtype b", 3, {"bfloat16"}),
    ],
)
def test_the_shell_completes_commands_flags_and_names(words: str, index: int, expected: set[str]) -> None:
    completing = {"_DEEPINFER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from deepinfer_core.cli.entry import main; sys.exit(main())"],
        env=os.environ | completing, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert expected <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_to_type(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Usage: deepinfer" in out
    assert re.search(rf"deepinfer {command}\b.*deepinfer {command}\b", out), "an example to copy"


def test_help_of_a_command_that_runs_a_model_lists_every_config_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for command in ("serve", "generate", "chat", "eval", "plan"):
        assert main([command, "--help"]) == 0
        out = re.sub(r"\s+", " ", capsys.readouterr().out)
        for key in config_keys():
            assert key == "model" or key in out


def test_every_config_key_is_taken_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for key in config_keys():
        if "." not in key and key != "batch_invariant":
            continue  # model is an argument, dtype and device have flags of their own
        flag = key.replace("<scheme>", "w4a16")
        main(["config", "show", f"--{flag}=?"])
        err = capsys.readouterr().err
        assert "No such option" not in err, key
        assert "unknown key" not in err, key


def test_a_trace_of_generate_is_valid_and_has_the_works(tiny_chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    flags = ["--device", "cpu", "--max-tokens", "5", "--ignore-eos", "--trace", str(path)]
    assert main(["generate", str(tiny_chat_model), "-p", "Hello", *flags]) == 0
    events = json.loads(path.read_text())
    kinds = [e["name"] for e in events if e["ph"] == "X" and e["name"] != "cycle"]
    assert kinds == ["prefill"] + ["decode"] * 4
    process = next(e["args"]["name"] for e in events if e["name"] == "process_name")
    assert "policy mixed" in process


def test_a_trace_of_a_bench_has_a_process_for_each_case(tiny_chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sizes = ["--concurrency", "1,2", "--prompt-tokens", "8", "--max-new-tokens", "4", "--iterations", "1"]
    flags = ["--policy", "serial,mixed", "--device", "cpu", "--trace", str(path)]
    assert main(["bench", "serving", str(tiny_chat_model), *sizes, *flags]) == 0
    events = json.loads(path.read_text())
    names = [e["args"]["name"].rpartition(" ")[2] for e in events if e["name"] == "process_name"]
    assert names == ["serial", "mixed"] * 2
    worked = {e["pid"] for e in events if e["name"] == "decode"}
    assert worked == {1, 2, 3, 4}


def test_a_trace_that_cannot_be_written_is_said_before_the_model_is_loaded(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--trace", str(tmp_path / "no" / "trace.json")]
    assert main(["generate", str(tiny_chat_model), "-p", "Hello", *flags]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_quantize_can_put_a_plugin_aside(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["quantize", str(tiny_chat_model), str(tmp_path / "out"), "--recipe", "w4", "--perplexity", "off"]
    assert main([*base, "--plugins.disable", "deepinfer-plugin-w4a16"]) != 0
    assert "w4" in capsys.readouterr().err
    config = tmp_path / "deepinfer.toml"
    config.write_text('[plugins]\ndisable = ["deepinfer-plugin-w3a16"]\n')
    assert main([*base, "--config", str(config)]) == 0
