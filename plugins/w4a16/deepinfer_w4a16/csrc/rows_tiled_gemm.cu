// w4a16.tiled_gemm over canonical rows: a warp decodes two B rows, lanes 0-15 and 16-31, one byte (two k) a lane.
#include "row_tiled_gemm.cuh"

__device__ __forceinline__ void unpack_tile(const RowProblem& p, int n0, int k0, TileB& b) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int k = k0 + 2 * (lane & 15);
  for (int row = 2 * warp + (lane >> 4); row < TILE_N; row += 2 * THREADS / 32) {
    const int n = n0 + row;
    half low = __float2half(0.0f), high = low;
    if (n < p.n && k < p.k) {
      const int byte = p.codes[(size_t)n * p.code_bytes + k / 2];
      low = scaled(p, n, k, byte & 15, 8);
      if (k + 1 < p.k) high = scaled(p, n, k + 1, byte >> 4, 8);
    }
    b[k - k0][row] = low;
    b[k - k0 + 1][row] = high;
  }
}
