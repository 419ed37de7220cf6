"""Small parts of the server by themselves: the relay, prompt offsets, bodies, histograms, grammars' constraint."""

import asyncio
import threading

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from deepinfer_core.config import ServerConfig, load_config
from deepinfer_core.engine.outputs import TokenOutput
from deepinfer_core.errors import ConfigError
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import Limits
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.server.access import read_key
from deepinfer_core.server.errors import ApiError, shortened
from deepinfer_core.server.generation import Event, Generation, Relay
from deepinfer_core.server.logprobs import _prompt_offsets
from deepinfer_core.server.prometheus import exposition
from deepinfer_core.server.service import ServedModel, Service
from deepinfer_core.testing.stub_model import StubBackend, StubModel


class Handle:
    """What a generation asks of an engine's handle."""

    def __init__(self):
        self.error, self.done, self.aborts = None, False, 0

    def abort(self):
        self.aborts += 1


def test_a_relay_loses_and_reorders_nothing_however_threads_put():
    async def run():
        relay = Relay(asyncio.get_running_loop())
        ended = []
        generations = [Generation(relay, ended.append) for _ in range(4)]
        for generation in generations:
            generation.started([Handle()], 1)

        def put(generation):
            sink, on_end = generation.sinks(0)
            for i in range(500):
                sink(TokenOutput(index=0, token=i))
            on_end()

        threads = [threading.Thread(target=put, args=(g,)) for g in generations]
        for thread in threads:
            thread.start()
        for generation in generations:
            tokens = []
            while not tokens or tokens[-1] is not None:
                tokens += [e.output and e.output.token for e in await generation.events()]
            assert tokens == [*range(500), None]
        for thread in threads:
            thread.join()
        assert set(ended) == set(generations)

    asyncio.run(run())


def test_a_closed_loop_is_no_error_of_the_engine():
    loop = asyncio.new_event_loop()
    relay = Relay(loop)
    loop.close()
    relay.put(None, Event(0, None))
    relay.put(None, Event(0, None))


def test_an_abort_wakes_who_waits_and_reaches_every_handle():
    async def run():
        generation = Generation(Relay(asyncio.get_running_loop()), lambda _: None)
        handles = [Handle(), Handle()]
        handles[1].done = True
        generation.started(handles, 2)
        waiter = asyncio.create_task(generation.events())
        await asyncio.sleep(0)
        generation.abort(ApiError(503, "over"))
        with pytest.raises(ApiError, match="over"):
            await waiter
        assert [h.aborts for h in handles] == [1, 0]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("Two plus", [b"Two", b" plus"], [0, 3]),
        ("Two plus", [b"<s>", b"Two", b" plus"], [0, 0, 3]),  # a start token has no width
        ("Two plus", [b" Two", b" plus"], [0, 3]),  # nor has SentencePiece's first space
        (" Two", [b" Two"], [0]),
        ("a\u732bb", [b"a", b"\xe7\x8c", b"\xab", b"b"], [0, 1, 1, 2]),
        ("\u732b", [b"\xe7", b"\x8c\xab"], [0, 0]),
    ],
)
def test_offsets_of_a_prompt_count_characters(text, tokens, offsets):
    assert _prompt_offsets(text, tokens) == offsets


def test_long_texts_lose_their_middle():
    assert len(shortened("x" * 10_000)) < 600
    assert shortened("a\ud800b") == "a?b"


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("DEEPINFER_API_KEY", raising=False)
    assert read_key(ServerConfig()) is None
    monkeypatch.setenv("DEEPINFER_API_KEY", " abc ")
    assert read_key(ServerConfig()) == "abc"
    empty = tmp_path / "key"
    empty.write_text("\n")
    for path, message in ((empty, "is empty"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            read_key(ServerConfig(api_key_file=str(path)))


def test_the_server_section_is_checked_like_all_others(tmp_path):
    file = tmp_path / "deepinfer.toml"
    file.write_text('[server]\nport = 0\ncors_origins = ["https://a.example"]\n', encoding="utf-8")
    resolved = load_config(file, {"server.host": "::1"})
    assert resolved.config.server.port == 0
    assert resolved.origins["server.port"] == f"file {file}"
    assert resolved.origins["server.host"] == "flag"
    for key, value, message in (
        ("port", "70000", "65535"),
        ("prot", "1", "did you mean 'port'"),
        ("max_queue", "0", "1"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(file, {f"server.{key}": value} if key != "prot" else {"server": {"prot": 1}})


class Text:
    """A tokenizer that shows numbers."""

    eos_ids = frozenset()
    template_text = ""

    def decode(self, ids, **_):
        return "".join(f" {i}" for i in ids)

    def token_bytes(self, token):
        return f" {token}".encode()


def test_metrics_are_prometheus_text_with_cumulative_buckets_and_bounded_labels():
    kv = KVCache(StubBackend(16), layers=1, page_size=16, pages=32)
    limits = Limits(max_batched_tokens=64, max_requests=4, prefill_chunk_tokens=32, page_size=16, max_model_len=128)
    from deepinfer_core.engine.engine import Engine

    engine = Engine(StubModel(97), kv, limits, vocab_size=97, tokenizer=Text())
    service = Service(ServerConfig())
    assert b"deepinfer:live_requests" in exposition(service)[0]  # before there is a model
    rows = [{"scheme": "w4a16", "n": "8", "k": "8", "m": "1", "kernel": "a", "layout": "b"}]
    service.attach(ServedModel(name='a"b', engine=engine, tokenizer=Text(), vocab_size=97, kernels=rows))
    handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    engine.drive(lambda: handle.done)
    service.http["/v1/completions", "POST", 200] += 1
    families = {f.name: f for f in text_string_to_metric_families(exposition(service)[0].decode())}
    value = lambda name: next(s.value for s in families[name].samples if not s.name.endswith("_created"))
    assert value("deepinfer:generation_tokens") == 5
    assert value("deepinfer:prompt_tokens") == 3
    assert value("deepinfer:compilations_after_ready") == 0
    assert value("deepinfer:num_requests_running") == 0
    ttft = families["deepinfer:time_to_first_token_seconds"].samples
    counts = [s.value for s in ttft if s.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == next(s.value for s in ttft if s.name.endswith("_count")) == 1
    assert {s.labels["finished_reason"] for s in families["deepinfer:request_success"].samples} == {
        "stop", "length", "abort", "error"
    }  # fmt: skip
    assert families["deepinfer:kernel_info"].samples[0].labels["kernel"] == "a"


class OnlyThree:
    """A constraint: token 3, then the end."""

    def __init__(self):
        self.taken = []

    def allowed(self, vocab):
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[9 if self.taken else 3] = True
        return mask

    def accept(self, token):
        self.taken.append(token)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_constraint_decides_for_its_own_rows_alone(temperature):
    from deepinfer_core.engine.sampler import Sampler

    sampler = Sampler([9])
    free = SamplingParams(temperature=temperature, seed=1)
    bound = SamplingParams(temperature=temperature, seed=1, constraint=OnlyThree, logprobs=0)
    states = [sampler.open(free, [0]), sampler.open(bound, [0]), sampler.open(bound, [0]).fork(1)]
    logits = torch.arange(10.0).repeat(3, 1)
    first = sampler.sample(logits, states)
    assert [s.token for s in first[1:]] == [3, 3]
    assert first[1].logprob == pytest.approx(float(logits[0].log_softmax(-1)[3]))  # the model's own
    assert first[0] == sampler.sample(logits[:1], states[:1])[0]
    states[1].accept(3)
    assert [s.token for s in sampler.sample(logits, states)[1:]] == [9, 3]
