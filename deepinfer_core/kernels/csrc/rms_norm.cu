// y = x / sqrt(mean(x^2) + eps) * weight for each row, after x += delta where there is a delta. One block a row; a row
// stays in registers between its two uses. VEC elements an access (8 needs 16-byte aligned rows), PER accesses a thread.
#include "ptx.cuh"

struct NormArgs {
  u16* x;
  const u16* delta;
  const u16* weight;
  u16* y;
  long long x_stride, delta_stride, y_stride;  // elements
  int width;
  float eps;
};

#if VEC == 8
typedef uint4 Pack;
#else
typedef u16 Pack;
#endif

extern "C" __global__ void __launch_bounds__(1024) rms_norm(const NormArgs p) {
  __shared__ float sums[32];
  const int packs = p.width / VEC;
  union Line {
    Pack pack;
    u16 each[VEC];
  };
  Line weight[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {  // constant: asked for while the kernel ahead still runs
    const int at = threadIdx.x + i * blockDim.x;
    if (at < packs) weight[i].pack = ((const Pack*)p.weight)[at];
  }
  dependents_may_start();
  wait_for_predecessor();

  Pack* x = (Pack*)(p.x + blockIdx.x * p.x_stride);
  float sum = 0.0f;
  float value[PER][VEC];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < packs) {
      Line line, added;
      line.pack = x[at];
      if (p.delta) {
        added.pack = ((const Pack*)(p.delta + blockIdx.x * p.delta_stride))[at];
#pragma unroll
        for (int j = 0; j < VEC; j++)
          line.each[j] = float_to_act(act_to_float(line.each[j]) + act_to_float(added.each[j]));
        x[at] = line.pack;
      }
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        value[i][j] = act_to_float(line.each[j]);
        sum += value[i][j] * value[i][j];
      }
    }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  const int lane = threadIdx.x & 31;
  sum = lane < (blockDim.x >> 5) ? sums[lane] : 0.0f;
#pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  const float scale = 1.0f / sqrtf(sum / p.width + p.eps);

  Pack* y = (Pack*)(p.y + blockIdx.x * p.y_stride);
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < packs) {
      Line line;
#pragma unroll
      for (int j = 0; j < VEC; j++)
        line.each[j] = float_to_act(value[i][j] * scale * act_to_float(weight[i].each[j]));
      y[at] = line.pack;
    }
  }
}
