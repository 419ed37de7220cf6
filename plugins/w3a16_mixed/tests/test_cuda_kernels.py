"""Every CUDA kernel of this distribution, held to the suite that authors use."""

from deepinfer_core.testing.linear import LinearKernelSuite


class TestGemv(LinearKernelSuite):
    kernel = "w3a16.gemv"


class TestBatchTileGemv(LinearKernelSuite):
    kernel = "w3a16.batch_tile_gemv"


class TestTiledGemm(LinearKernelSuite):
    kernel = "w3a16.tiled_gemm"


class TestMma(LinearKernelSuite):
    kernel = "w3a16.mma"


class TestMmaStream(LinearKernelSuite):
    kernel = "w3a16.mma_stream"


class TestMmaTile(LinearKernelSuite):
    kernel = "w3a16.mma_tile"


class TestMmaDecodeMatmul(LinearKernelSuite):
    kernel = "w3a16.mma_decode_matmul"
