"""``deepinfer serve`` as a process: it says its budget and where it listens, answers, traces, and ends in order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deepinfer_core.cli import serve as serve_module
from deepinfer_core.cli.main import main


@pytest.mark.skipif(sys.platform == "win32", reason="a console's Ctrl-C cannot be sent to one child on Windows")
def test_it_says_budget_and_address_serves_page_and_api_and_leaves_a_whole_trace(
    tiny_chat_model: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer_core", "serve", str(tiny_chat_model), "--device", "cpu", "--port", "0",
         "--served-model-name", "tiny", "--no-prefill-decode-overlap", "--trace", str(trace), "--cache.page_size", "8"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said, url = "", None
        while url is None:
            line = process.stderr.readline()
            assert line, said
            said += line
            if match := re.search(r"listening on (http://[\d.]+:\d+)", line):
                url = match[1]
        assert "KV cache: float32" in said
        assert "context: 256 tokens, the model's own" in said
        assert "<title>deepinfer</title>" in httpx.get(url).text
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200
        status = httpx.get(f"{url}/status").json()
        assert status["engine"]["prefill_decode_overlap"] is False
        assert status["engine"]["pool"]["page_size"] == 8
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == 130
    assert "Traceback" not in rest
    events = json.loads(trace.read_text())
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"prefill", "decode", "cycle"}


def test_without_its_extra_it_says_what_to_install(
    tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n == "fastapi" or n.startswith(("deepinfer_core.server", "fastapi."))]:
        monkeypatch.delitem(sys.modules, name)

    class NoFastApi:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "fastapi":
                raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    monkeypatch.setattr(sys, "meta_path", [NoFastApi(), *sys.meta_path])
    assert main(["serve", str(tiny_chat_model)]) == 2
    err = capsys.readouterr().err
    assert 'pip install "deepinfer-core[server]"' in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "no model was named" in capsys.readouterr().err


def test_flags_reach_the_server(tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(serve_module, "_server", lambda: lambda resolved, **_: seen.append(resolved.config) or 0)
    key = tmp_path / "key"
    flags = ["--host", "::1", "--port", "9", "--api-key-file", str(key), "--max-model-len", "64", "--policy", "serial"]
    assert main(["serve", str(tiny_chat_model), *flags, "--server.max_queue", "7"]) == 0
    (config,) = seen
    assert (config.server.host, config.server.port, config.server.api_key_file) == ("::1", 9, str(key))
    assert (config.server.max_queue, config.cache.max_model_len, config.scheduler.policy) == (7, 64, "serial")
