"""Hostile, slow, gone and impatient clients: right codes, flat memory, nobody else harmed, every page back."""

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"model": "tiny", "prompt": "x" * 40, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def quick_health(served: Any) -> None:
    start = time.monotonic()
    assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200
    assert time.monotonic() - start < 1


def reset(sock: socket.socket) -> None:
    """Close with a reset instead of a farewell."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# Clients that go.


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_a_client_that_left_asked_for_ends(make_served: Any, stream: bool, leave: Any) -> None:
    served = make_served(slow=0.02, requests=2)
    body = json.dumps({**LONG, "stream": stream}).encode()
    socks = [served.raw() for _ in range(4)]  # two run, two wait
    for sock in socks:
        sock.sendall(served.http("POST", TEXT, body))
    served.wait(lambda: served.service.live == 4)
    served.wait(lambda: served.engine.status()["queues"]["decoding"] == 2)
    assert served.engine.status()["queues"]["waiting"] == 2
    if stream:
        assert socks[0].recv(100)
    for sock in socks:
        leave(sock)
    start = time.monotonic()
    served.wait(served.idle, 1.0)
    assert time.monotonic() - start < 1
    served.wait(lambda: served.status()["server"]["client_disconnects"] == 4)
    assert served.engine.status()["finished"]["abort"] == 4


def test_a_neighbour_of_one_that_left_is_not_harmed(make_served: Any) -> None:
    served = make_served(slow=0.005)
    alone = served.complete(prompt="Hello", max_tokens=60, ignore_eos=True)["choices"]
    sock = served.raw()
    sock.sendall(served.http("POST", TEXT, json.dumps({**LONG, "stream": True}).encode()))
    threading.Timer(0.1, sock.close).start()
    assert served.complete(prompt="Hello", max_tokens=60, ignore_eos=True)["choices"] == alone


def test_a_client_that_stops_reading_is_let_go(make_served: Any) -> None:
    served = make_served(write_timeout_seconds=1, max_choices=128, max_queue=4096)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", served.port))
    ask = {**LONG, "n": 100, "stream": True, "logprobs": 20, "prompt": "x"}  # more than all buffers hold
    sock.sendall(served.http("POST", TEXT, json.dumps(ask).encode()))
    served.wait(lambda: served.service.live > 0)
    quick_health(served)
    served.wait(lambda: served.idle() and served.service.disconnects == 1, 20)
    sock.close()


# Too much, too slow.


def test_bodies_that_are_too_large_are_refused_with_memory_flat(served: Any) -> None:
    mib = b"x" * (1 << 20)
    served.client.get("/health")
    before = psutil.Process().memory_info().rss

    def parts(count: int) -> Any:
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(count):
            yield mib

    for headers in ({}, {"Content-Length": str((200 << 20) + 29)}):
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            answer = served.client.post(
                TEXT, content=parts(200), headers={"Content-Type": "application/json", **headers}
            )
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
        quick_health(served)
    assert psutil.Process().memory_info().rss - before < 40 << 20
    with served.raw() as sock:  # a sender that waits for the answer gets it before it has sent the body
        sock.sendall(served.http("POST", TEXT, headers={"Content-Length": str(200 << 20), "Expect": "100-continue"}))
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_many_of_anything_is_refused_fast(served: Any) -> None:
    base = {"model": "tiny", "prompt": "x"}
    for wrong in ({"n": 2_000_000}, {"logprobs": 10**8}, {"stop": ["s"] * 100_000}, {"prompt": ["x"] * 5000, "n": 100},
                  {"prompt": ["x"] * 257}, {"logit_bias": {str(i): 1 for i in range(50_000)}},
                  {"prompt": "x" * 900_000}, {"prompt": [1] * 300_000}):  # fmt: skip
        start = time.monotonic()
        served.refused(TEXT, {**base, **wrong})
        assert time.monotonic() - start < 2
        quick_health(served)
    for deep in (b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        answer = served.client.post(TEXT, content=deep, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        quick_health(served)


def test_a_head_or_a_body_that_drips_is_cut_off(served: Any) -> None:
    """The server reads a request for two seconds."""
    head, body, nothing = served.raw(), served.raw(), served.raw()
    head.sendall(b"GET /hea")
    body.sendall(served.http("POST", TEXT, headers={"Content-Type": "application/json", "Content-Length": "900"}))
    start = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - start < 3:
            quick_health(served)
            time.sleep(0.2)
            head.send(b"l")
            body.send(b" ")
    assert served.read_all(head) == b""
    assert served.read_all(body).startswith(b"HTTP/1.1 408")
    assert served.read_all(nothing) == b""
    assert time.monotonic() - start < 6
    for sock in (head, body, nothing):
        sock.close()


def test_heads_that_are_too_large_are_refused(served: Any) -> None:
    with served.raw() as sock, contextlib.suppress(ConnectionError):
        sock.sendall(served.http("GET", "/health", headers={"X-Request-Id": "a" * (1 << 20)}))
        assert served.read_all(sock).startswith(b"HTTP/1.1 4")
    quick_health(served)


# What is no request.


@pytest.mark.parametrize(
    "raw",
    [b'{"model":"tiny","prompt":"\xff\xfe"}', b"{", b"[]", b'"hi"', b"", b"null", b"5", b'{"model":"tiny","prompt":',
     b'{"model":"tiny","prompt":"x","temperature":NaN}', b'{"model":"tiny","prompt":"x","temperature":Infinity}',
     b'{"model":"tiny","prompt":"\\ud800"}', b'{"model":"tiny","prompt":"x","stop":"\\ud800"}',
     b'{"model":"\\ud800","prompt":"x"}x', b'{"model":"tiny","prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
     b"\xef\xbb\xbf{}", b"\x00"],
)  # fmt: skip
def test_bodies_that_are_no_json_object_are_400(served: Any, raw: bytes) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        answer = served.client.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert served.complete(prompt="x", max_tokens=1)["choices"]


def test_of_a_key_that_stands_twice_the_last_counts(served: Any) -> None:
    raw = b'{"model":"tiny","prompt":"x","max_tokens":9,"max_tokens":2,"ignore_eos":true}'
    answer = served.client.post(TEXT, content=raw, headers={"Content-Type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_only_json_is_taken_as_json(served: Any, kind: str | None) -> None:
    raw = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    assert served.client.post(TEXT, content=raw, headers=headers).status_code == 400


def test_a_long_text_is_never_repeated_in_an_error(served: Any) -> None:
    secret = "tell nobody " * 5000
    for wrong in ({"prompt": {"a": secret}}, {"stop": secret}, {"logit_bias": {secret: 1}}, {"temperature": secret},
                  {"prompt": secret}, {"model": secret}):  # fmt: skip
        answer = served.post(TEXT, {"model": "tiny", "prompt": "x", **wrong})
        assert answer.status_code in (400, 404)
        assert len(answer.text) < 900


def test_what_is_no_http_gets_an_error_of_the_same_form(served: Any) -> None:
    with served.raw() as sock:
        sock.sendall(b"HELLO\r\n\r\n")
        head, _, body = served.read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"


# Who may.


def test_pages_of_other_sites_may_not_drive_the_server(served: Any, make_served: Any) -> None:
    evil = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for answer in (served.client.options(TEXT, headers=evil), served.post(TEXT, ask, headers=evil)):
        assert answer.status_code >= 400
        assert "access-control-allow-origin" not in answer.headers
    assert served.post(TEXT, ask, headers={"Origin": served.url}).status_code == 200
    good = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    open_to = make_served(cors_origins=("https://good.example",))
    for answer in (open_to.client.options(TEXT, headers=good), open_to.post(TEXT, ask, headers=good)):
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert "access-control-allow-credentials" not in answer.headers
    for answer in (open_to.client.options(TEXT, headers=evil), open_to.post(TEXT, ask, headers=evil)):
        assert answer.headers.get("access-control-allow-origin") is None


def test_every_route_but_health_wants_the_key(make_served: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("sésame\n", encoding="utf-8")
    monkeypatch.setenv("DEEPINFER_API_KEY", "another")  # the file goes before it
    served = make_served(api_key_file=str(file), headers={"Authorization": "Bearer sésame".encode()})
    assert httpx.get(f"{served.url}/health").status_code == 200
    routes = [
        (m.upper(), path) for path, item in served.client.get("/openapi.json").json()["paths"].items() for m in item
    ]
    wrong = ("", "Bearer", "Bearer another", "Bearer sésame1", "Basic x", "sésame")
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/nowhere")]:
        for value in wrong if path == "/v1/models" else wrong[:1]:
            answer = httpx.request(method, f"{served.url}{path}", headers={"Authorization": value.encode()})
            assert answer.status_code == (200 if path == "/health" else 401), (method, path, value)
            if path != "/health":
                assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{served.url}/v1/models", auth=("me", "sésame")).status_code == 200


def test_a_key_may_come_from_the_environment(make_served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_API_KEY", "abc")
    served = make_served(headers={"Authorization": "Bearer abc"})
    assert httpx.get(f"{served.url}/status").status_code == 401


# Names in logs.


@pytest.mark.parametrize("given", ["a%0d%0aERROR fake", "a" * 65, "caf\u00e9", "a b", "", "{}", "x\ty"])
def test_request_ids_are_replaced_unless_short_and_plain(
    served: Any, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    caplog.set_level(logging.INFO, logger="deepinfer.server")
    answer = httpx.get(f"{served.url}/version", headers={"X-Request-Id": given.encode("latin-1")})
    assert answer.headers["x-request-id"].startswith("req-")
    served.wait(lambda: len(caplog.records) >= 1)
    (record,) = [r for r in caplog.records if "/version" in r.getMessage()]
    assert "\n" not in record.getMessage()
    assert answer.headers["x-request-id"] in record.getMessage()
    kept = httpx.get(f"{served.url}/version", headers={"X-Request-Id": "abc-1.2_3"})
    assert kept.headers["x-request-id"] == "abc-1.2_3"


def test_two_requests_of_one_id_are_independent(make_served: Any) -> None:
    served = make_served(slow=0.01)
    headers = {"X-Request-Id": "same"}
    one, other = served.raw(), served.raw()
    body = json.dumps({**LONG, "max_tokens": 60, "stream": True}).encode()
    for sock in (one, other):
        sock.sendall(served.http("POST", TEXT, body, {**headers, "Connection": "close"}))
    served.wait(lambda: served.service.live == 2)
    one.close()
    assert b"[DONE]" in served.read_all(other)
    assert served.engine.status()["finished"] == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    other.close()


def test_json_log_lines_hold_the_request(served: Any) -> None:
    from deepinfer_core.server.requests_log import JsonLines

    record = logging.LogRecord("deepinfer.server", logging.INFO, "x", 1, "a\n%s", ("b",), None)
    record.fields = {"request_id": "r", "status": 200}
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line) | {"time": 0} == {
        "time": 0, "level": "INFO", "logger": "deepinfer.server", "message": "a\nb", "request_id": "r", "status": 200,
    }  # fmt: skip


# Full, not ready, ending.


def test_a_full_queue_says_when_to_come_again(make_served: Any) -> None:
    served = make_served(slow=0.02, requests=1, max_queue=2)
    socks = [served.raw() for _ in range(3)]
    for sock in socks:
        sock.sendall(served.http("POST", TEXT, json.dumps(LONG).encode()))
    served.wait(lambda: served.service.live == 3)
    answer = served.post(TEXT, {"model": "tiny", "prompt": "x"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full"
    for sock in socks:
        sock.close()
    served.wait(served.idle)
    assert served.complete(prompt="x", max_tokens=1)["choices"]


def test_before_the_model_is_there_only_health_is_good(make_served: Any) -> None:
    served = make_served()
    served.service._model, served.service.state = None, "loading"
    ask = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/status").json()["server"]["state"] == "loading"
    assert served.client.get("/metrics").status_code == 200
    for answer in (served.client.get("/ready"), served.post(TEXT, ask), served.post(CHAT, ask),
                   served.client.get("/v1/models"), served.post("/tokenize", {"prompt": "x"})):  # fmt: skip
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


def test_a_prompt_that_only_an_empty_pool_could_hold_is_refused(make_served: Any) -> None:
    served = make_served(pages=8)
    assert served.engine.kv.total_pages == 8
    served.refused(TEXT, {"model": "tiny", "prompt": "x" * 200, "max_tokens": 4})
    assert served.complete(prompt="x" * 10, max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4
    answer = served.complete(prompt="x" * 120, max_tokens=100, ignore_eos=True)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (8, "length")


def test_a_stop_lets_requests_finish_within_the_grace_and_refuses_new_ones(make_served: Any) -> None:
    served = make_served(slow=0.01, grace_seconds=20)
    sock = served.raw()
    body = json.dumps({**LONG, "max_tokens": 100, "stream": True}).encode()
    sock.sendall(served.http("POST", TEXT, body))
    served.wait(lambda: served.service.live == 1)
    served.front.stop()
    served.wait(lambda: served.service.state == "draining")
    answer = served.post(TEXT, {"model": "tiny", "prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert served.client.get("/ready").status_code == 503
    assert served.client.get("/health").status_code == 200
    assert b"[DONE]" in served.read_all(sock)
    served._thread.join(5)
    assert not served._thread.is_alive()
    assert served.engine.status()["finished"]["length"] == 1


def test_what_outlasts_the_grace_ends_with_an_error_event(make_served: Any) -> None:
    served = make_served(slow=0.05, grace_seconds=1)
    streamed, whole, deaf = served.raw(), served.raw(), served.raw()
    for sock, stream in ((streamed, True), (whole, False), (deaf, True)):
        sock.sendall(served.http("POST", TEXT, json.dumps({**LONG, "stream": stream}).encode()))
    served.wait(lambda: served.service.live == 3)
    start = time.monotonic()
    served.front.stop()
    tail = served.read_all(streamed)
    assert b'"code":"service_unavailable"' in tail
    assert b"data: [DONE]" in tail
    assert served.read_all(whole).startswith(b"HTTP/1.1 503")
    served._thread.join(5)
    assert not served._thread.is_alive()
    assert time.monotonic() - start < 4
    served.wait(lambda: served.engine.status()["finished"]["abort"] == 3)


def test_a_failure_of_the_engine_ends_its_request_alone(make_served: Any) -> None:
    served = make_served()
    model = served.engine._model

    class Broken:
        def forward(self, tokens: Any, *rest: Any) -> Any:
            logits = model.forward(tokens, *rest)
            return logits * float("nan") if int(tokens[0]) == 66 else logits

    served.engine._model = Broken()
    answer = served.post(TEXT, {"model": "tiny", "prompt": [66], "max_tokens": 3})
    assert answer.status_code == 500
    assert "not finite" in answer.json()["error"]["message"]
    with served.client.stream("POST", TEXT, json={"model": "tiny", "prompt": [66], "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert "not finite" in lines[0]
    assert lines[-1] == "data: [DONE]"
    assert served.complete(prompt="x", max_tokens=1)["choices"]
