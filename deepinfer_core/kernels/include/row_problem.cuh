// One linear layer in the canonical row layout, as every kernel that reads rows gets it, and how a result leaves.
#pragma once
#include <cuda_fp16.h>

struct RowProblem {
  const half* x;               // [m, k], rows x_stride apart
  const unsigned char* codes;  // [n, code_bytes]: the checkpoint's packed tensor as it is
  const half* scales;          // [n, groups]
  const half* zeros;           // [n, groups] in code units, or null: signed codes
  const half* bias;            // [n] or null
  const half* residual;        // [m, n] or null
  half* out;                   // [m, n]
  long long x_stride;
  int m, n, k, group, groups, code_bytes;
};

// Adds bias and residual in float32 and rounds once.
__device__ __forceinline__ void store_out(const RowProblem& p, int row, int col, float value) {
  const size_t at = (size_t)row * p.n + col;
  if (p.bias) value += __half2float(p.bias[col]);
  if (p.residual) value += __half2float(p.residual[at]);
  p.out[at] = __float2half(value);
}
