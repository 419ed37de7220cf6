// The tiled GEMM of the first system, kept as a readable reference: a 32 x 64 output tile, 32 inputs a step, 256 threads.
//
// A block stages 32 rows of activations and 64 rows of *decoded* weights in shared memory as FP16, then each thread
// multiplies its 2 x 4 corner with float32 accumulators. Temporary storage depends on the tile alone: there is never an
// FP16 copy of the weights. The file that includes this one says how a block decodes its weights (`unpack_tile`).
#pragma once
#include "row_problem.cuh"

constexpr int TILE_M = 32, TILE_N = 64, TILE_K = 32, THREADS = 256;
constexpr int PAD_N = TILE_N + 1;  // 65: the four columns of a thread and its neighbours' fall into different banks

using TileB = half[TILE_K][PAD_N];

// Fills B[k][n] with the values of outputs n0..n0+63 at inputs k0..k0+31; zero outside the matrix.
__device__ void unpack_tile(const RowProblem& p, int n0, int k0, TileB& b);

// One decoded weight; group edges fall anywhere, the division costs little beside the reference's other work.
__device__ __forceinline__ half scaled(const RowProblem& p, int n, int k, int code, int signed_bias) {
  const size_t at = (size_t)n * p.groups + k / p.group;
  const float zero = p.zeros ? __half2float(p.zeros[at]) : 0.0f;
  const float value = p.zeros ? (float)code : (float)((code ^ signed_bias) - signed_bias);
  return __float2half((value - zero) * __half2float(p.scales[at]));
}

extern "C" __global__ void __launch_bounds__(THREADS) tiled_gemm(RowProblem p) {
  __shared__ half a[TILE_M][TILE_K];
  __shared__ TileB b;
  const int tid = threadIdx.x, m0 = blockIdx.y * TILE_M, n0 = blockIdx.x * TILE_N;
  const int row = 2 * (tid >> 4), col = 4 * (tid & 15);
  float sum[2][4] = {};
  for (int k0 = 0; k0 < p.k; k0 += TILE_K) {
    for (int i = tid; i < TILE_M * TILE_K; i += THREADS) {
      const int r = i / TILE_K, k = i % TILE_K;
      const bool inside = m0 + r < p.m && k0 + k < p.k;
      a[r][k] = inside ? p.x[(size_t)(m0 + r) * p.x_stride + k0 + k] : __float2half(0.0f);
    }
    unpack_tile(p, n0, k0, b);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE_K; k++) {
      const float x0 = __half2float(a[row][k]), x1 = __half2float(a[row + 1][k]);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float w = __half2float(b[k][col + j]);
        sum[0][j] += x0 * w;
        sum[1][j] += x1 * w;
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 4; j++)
      if (m0 + row + i < p.m && n0 + col + j < p.n) store_out(p, m0 + row + i, n0 + col + j, sum[i][j]);
}
