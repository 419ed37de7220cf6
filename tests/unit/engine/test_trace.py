"""The trace file: a row per lane, slices that add up to what was counted, and valid whenever the process dies."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_core.engine.trace import TraceFile
from deepinfer_core.errors import ConfigError
from deepinfer_core.plugin_api import LaneSpec
from deepinfer_core.sampling import SamplingParams


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


@pytest.fixture
def traced(tmp_path, make_engine, run):
    """Run three requests under a trace; returns (events, engine)."""

    def traced(**options):
        engine = make_engine(**options)
        with TraceFile(tmp_path / "trace.json") as file:
            engine.trace_to(file)
            handles = [engine.submit([(5 * i + s) % 90 for i in range(70)], greedy(6)) for s in range(3)]
            run(engine, *handles)
        return json.loads((tmp_path / "trace.json").read_text()), engine

    return traced


def test_every_work_is_a_slice_on_its_lanes_row(traced):
    lanes = (LaneSpec(name="decode", priority=1), LaneSpec(name="prefill"))
    events, engine = traced(lanes=lanes)
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert rows == {"scheduler": 0, "lane decode": 1, "lane prefill": 2}
    works = [e for e in events if e["ph"] == "X" and e["name"] != "cycle"]
    assert len(works) == engine.metrics.works
    computed = sum(e["args"]["tokens"] for e in works)
    assert computed == engine.metrics.prompt_tokens_total + engine.metrics.generated_tokens_total - 3
    lane_us = sum(e["dur"] for e in works)
    assert lane_us == pytest.approx(1e6 * sum(engine.metrics.lane_seconds.values()), abs=len(works))
    for work in works:
        assert sum(work["args"]["requests"].values()) == work["args"]["tokens"]


def test_slices_of_one_stream_do_not_overlap_and_lie_in_their_cycle(traced):
    events, _ = traced()
    slices = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] != "cycle"]
    cycles = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "cycle"]
    assert len(slices) > 5
    for (_, end), (begin, _) in itertools.pairwise(slices):
        assert begin >= end - 0.2
    for begin, end in slices:
        assert any(a - 0.2 <= begin and end <= b + 0.2 for a, b in cycles)


def test_counters_end_with_an_empty_engine_and_add_up_to_the_pool(traced):
    events, engine = traced(pages=40)
    pages = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "KV pages"]
    requests = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "requests"]
    assert all(sum(p.values()) == 40 for p in pages)
    assert max(p["used"] for p in pages) > 0
    assert pages[-1]["used"] == 0
    assert max(sum(r.values()) for r in requests) == 3
    assert requests[-1] == {"waiting": 0, "prefilling": 0, "decoding": 0}
    assert engine.status()["lanes"]["main"]["busy_seconds"] > 0


KILLED = """
import os, sys
from deepinfer_core.engine.trace import TraceFile
file = TraceFile(sys.argv[1])
trace = file.observer("engine", ("main",), shared=True)
for i in range(200000):
    file.write({"name": "x", "ph": "i", "ts": i, "pid": 1, "tid": 0})
    file.flush(now=i % 1000 == 999)
    if i == 150500:
        os._exit(9)
"""


def test_what_a_killed_process_leaves_is_whole_events(tmp_path):
    path = tmp_path / "trace.json"
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False, timeout=120)
    assert done.returncode == 9
    text = path.read_text()
    assert not text.rstrip().endswith("]")
    events = json.loads(text + "\n]")  # what Chrome and Perfetto do for the array form
    assert len(events) == 150_000 + 5


def test_a_second_trace_replaces_the_first_and_an_empty_one_is_valid(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("x" * 1000)
    file = TraceFile(path)
    file.close()
    file.close()
    assert json.loads(path.read_text()) == []


def test_a_place_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"--trace .*cannot be written"):
        TraceFile(tmp_path / "no" / "such" / "trace.json")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_and_not_the_engine(make_engine, run, caplog):
    engine = make_engine()
    with TraceFile("/dev/full") as file:
        engine.trace_to(file)
        (result,) = run(engine, engine.submit([1, 2, 3], greedy(4)))
    assert len(result.token_ids) == 4
    assert caplog.text.count("the trace /dev/full ends here") == 1
