"""Compiling without a GPU: options, resource report, errors that say what to install."""

import os

import pytest

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels import nvrtc
from deepinfer_core.kernels.nvrtc import CudaSource, compile_source, parse_resources

ADD = """
#include <cuda_fp16.h>
extern "C" __global__ void add(half* x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x;
  __shared__ float pad[SIZE]; pad[threadIdx.x] = 1.0f; __syncthreads();
  if (i < n) x[i] = __hadd(x[i], __float2half(pad[n - i])); }
"""


@pytest.fixture
def add(tmp_path):
    path = tmp_path / "add.cu"
    path.write_text(ADD)
    return path


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_compiles_for_every_target_and_reports_resources(add, capability):
    compiled = compile_source(CudaSource.make(add, {"SIZE": 64}), capability)
    assert compiled.cubin.startswith(b"\x7fELF")
    used = compiled.resources["add"]
    # The assembler reports 1 KB of its own per block from sm_90 on, so only the lower bound is ours.
    assert used.shared_bytes >= 256
    assert 0 < used.registers < 64
    assert used.spill_bytes == 0


def test_macros_are_part_of_the_machine_code(add):
    small = compile_source(CudaSource.make(add, {"SIZE": 64}), (8, 6)).resources["add"]
    large = compile_source(CudaSource.make(add, {"SIZE": 1024}), (8, 6)).resources["add"]
    assert large.shared_bytes - small.shared_bytes == (1024 - 64) * 4


def test_a_compile_error_names_file_macros_target_and_log(tmp_path):
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void f() { undefined_name; }')
    with pytest.raises(KernelError, match=r"(?s)broken\.cu \(W=4\) does not compile for sm_86.*undefined_name"):
        compile_source(CudaSource.make(path, {"W": 4}), (8, 6))


def test_a_missing_header_is_named_with_the_remedy(tmp_path):
    path = tmp_path / "h.cu"
    path.write_text("#include <not_there.h>\n")
    with pytest.raises(KernelError, match=r"not_there\.h.*pip install deepinfer-core\[cuda12\]"):
        compile_source(CudaSource.make(path), (8, 6))


def test_missing_toolkit_headers_are_one_message(monkeypatch):
    nvrtc.toolkit_headers.cache_clear()
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda _: None)
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvrtc.Path, "is_file", lambda self: False)
    try:
        with pytest.raises(KernelError, match=r"cuda_fp16\.h was not found.*pip install"):
            nvrtc.toolkit_headers()
    finally:
        nvrtc.toolkit_headers.cache_clear()


def test_a_missing_source_names_the_file(tmp_path):
    with pytest.raises(KernelError, match=r"gone\.cu cannot be read"):
        compile_source(CudaSource.make(tmp_path / "gone.cu"), (8, 6))


def test_compiles_when_the_temporary_directory_is_not_ascii(add, tmp_path, monkeypatch):
    folder = tmp_path / "größe-温度"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    assert compile_source(CudaSource.make(add, {"SIZE": 64}), (8, 6)).cubin
    assert os.environ["TMPDIR"] == str(folder)


def test_the_report_of_several_kernels_is_read():
    log = """ptxas info    : Compiling entry function 'a' for 'sm_86'
ptxas info    : Function properties for a
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'b' for 'sm_86'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 380 bytes cmem[0]
"""
    report = parse_resources(log)
    assert (report["a"].registers, report["a"].spill_bytes, report["a"].shared_bytes) == (40, 16, 1024)
    assert (report["b"].registers, report["b"].spill_bytes, report["b"].shared_bytes) == (12, 0, 0)
