// w3a16.tiled_gemm over canonical rows: a warp decodes eight B rows, row = lane >> 2, eight-code group = lane & 3,
// so the eight warps fill the 64 rows in one pass.
#include "row_tiled_gemm.cuh"

__device__ __forceinline__ void unpack_tile(const RowProblem& p, int n0, int k0, TileB& b) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = 8 * warp + (lane >> 2), n = n0 + row, first = 8 * (lane & 3);
  unsigned word = 0;
  if (n < p.n && k0 + first < p.k) {
    const unsigned char* at = p.codes + (size_t)n * p.code_bytes + (k0 + first) / 8 * 3;
    word = at[0] | (unsigned)at[1] << 8 | (unsigned)at[2] << 16;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int k = k0 + first + i;
    const bool inside = n < p.n && k < p.k;
    b[first + i][row] = inside ? scaled(p, n, k, (word >> (3 * i)) & 7, 4) : __float2half(0.0f);
  }
}
