"""The disk cache: keyed by all that matters, tolerant of everything that a disk can do (case KL-07)."""

import logging
import subprocess
import sys

import pytest

from deepinfer_core.kernels import cubin_cache
from deepinfer_core.kernels.nvrtc import CudaSource


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cubin_cache.CACHE_ENV, str(tmp_path / "cache"))
    cubin_cache._warned.clear()
    return tmp_path / "cache" / "cubin"


def test_what_was_written_is_read_back(cache):
    cubin_cache.write("k", b"code")
    assert cubin_cache.read("k") == b"code"
    assert cubin_cache.read("other") is None
    assert [p.name for p in cache.iterdir()] == ["k.bin"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:20], lambda b: b[:-1] + b"x"])
def test_a_damaged_file_is_ignored_and_replaced(cache, damage, caplog):
    cubin_cache.write("k", b"code")
    path = cache / "k.bin"
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "deepinfer.kernels"):
        assert cubin_cache.read("k") is None
    assert "k.bin is damaged" in caplog.text
    cubin_cache.write("k", b"code")
    assert cubin_cache.read("k") == b"code"


def test_a_folder_that_cannot_be_written_warns_once_and_names_the_remedy(tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("")  # a file where the folder should be: fails for root too, unlike mode 0555
    monkeypatch.setenv(cubin_cache.CACHE_ENV, str(blocker / "cache"))
    cubin_cache._warned.clear()
    with caplog.at_level(logging.WARNING, "deepinfer.kernels"):
        cubin_cache.write("k", b"code")
        cubin_cache.write("k", b"code")
    assert caplog.text.count("DEEPINFER_CACHE_DIR") == 1
    assert cubin_cache.read("k") is None


WRITER = """
from deepinfer_core.kernels import cubin_cache
for _ in range(50):
    cubin_cache.write("same", bytes([7]) * 100_000)
    assert cubin_cache.read("same") == bytes([7]) * 100_000, "half a file was read"
"""


def test_parallel_writers_never_show_half_a_file(cache):
    workers = [subprocess.Popen([sys.executable, "-c", WRITER]) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert [p.name for p in cache.iterdir()] == ["same.bin"]


def test_the_key_follows_text_includes_macros_and_target(tmp_path):
    (tmp_path / "part.cuh").write_text("int a;")
    main = tmp_path / "main.cu"
    main.write_text('#include "part.cuh"\n')
    source = CudaSource.make(main, {"N": 1})
    first = cubin_cache.cache_key(source, (8, 6))
    assert cubin_cache.cache_key(source, (8, 6)) == first
    assert cubin_cache.cache_key(source, (9, 0)) != first
    assert cubin_cache.cache_key(CudaSource.make(main, {"N": 2}), (8, 6)) != first
    (tmp_path / "part.cuh").write_text("int b;")
    assert cubin_cache.cache_key(source, (8, 6)) != first
