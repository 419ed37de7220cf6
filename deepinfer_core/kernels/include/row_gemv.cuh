// GEMV over the canonical row layout: one warp an output feature, lanes along K, ROWS activations share a weight read.
//
// ROWS = 1 is the single-row kernel (grid.y = batch runs it once a row); ROWS = 8 is the batch tile: an eighth of the
// weight reads for eight accumulators a lane, which costs occupancy. Which one wins is measured, not assumed.
// The file that includes this one says how eight consecutive codes are read (`read8`).
#pragma once
#include "row_problem.cuh"

constexpr int WARPS = 8;

// Reads codes k..k+7 (k a multiple of 8) of one packed row, as unsigned fields; bits past the row's end are undefined.
__device__ void read8(const unsigned char* row, int code_bytes, int k, int (&codes)[8]);

__device__ __forceinline__ void load8(const half* x, int left, bool aligned, float (&v)[8]) {
  if (aligned && left >= 8) {
    const uint4 raw = *reinterpret_cast<const uint4*>(x);
    const half2* h = reinterpret_cast<const half2*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 f = __half22float2(h[i]);
      v[2 * i] = f.x;
      v[2 * i + 1] = f.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = i < left ? __half2float(x[i]) : 0.0f;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) gemv(RowProblem p) {
  const int lane = threadIdx.x & 31, n = blockIdx.x * WARPS + (threadIdx.x >> 5), m0 = blockIdx.y * ROWS;
  if (n >= p.n) return;
  const unsigned char* row = p.codes + (size_t)n * p.code_bytes;
  const half* x = p.x + (size_t)m0 * p.x_stride;
  const bool aligned = ((size_t)p.x | (p.x_stride * 2)) % 16 == 0;
  const int flip = 1 << (BITS - 1);
  float sum[ROWS] = {};
  for (int k = lane * 8; k < p.k; k += 32 * 8) {
    int codes[8];
    read8(row, p.code_bytes, k, codes);
    // Groups are multiples of 8 or the whole row, so eight codes share one scale.
    const size_t group = (size_t)n * p.groups + k / p.group;
    const float scale = __half2float(p.scales[group]);
    const float zero = p.zeros ? __half2float(p.zeros[group]) : 0.0f;
    float w[8];
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = ((p.zeros ? (float)codes[i] : (float)((codes[i] ^ flip) - flip)) - zero) * scale;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (m0 + r >= p.m) break;
      float v[8];
      load8(x + (size_t)r * p.x_stride + k, p.k - k, aligned, v);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[r] += v[i] * w[i];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    for (int step = 16; step; step >>= 1) sum[r] += __shfl_xor_sync(~0u, sum[r], step);
    if (lane == 0 && m0 + r < p.m) store_out(p, m0 + r, n, sum[r]);
  }
}
