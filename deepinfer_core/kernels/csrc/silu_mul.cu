// out = silu(gate) * up, element by element, rounded once; VEC elements a thread (8 needs 16-byte aligned rows).
#include "ptx.cuh"

struct SiluArgs {
  const u16* gate;
  const u16* up;
  u16* out;
  long long gate_stride, up_stride, out_stride;  // elements
  int rows, width;
};

#if VEC == 8
typedef uint4 Pack;
#else
typedef u16 Pack;
#endif

extern "C" __global__ void __launch_bounds__(256) silu_mul(const SiluArgs p) {
  union Line {
    Pack pack;
    u16 each[VEC];
  };
  dependents_may_start();
  wait_for_predecessor();
  const int packs = p.width / VEC;
  const u32 at = blockIdx.x * 256 + threadIdx.x;
  const int row = at / packs, column = at - row * packs;
  if (row >= p.rows) return;
  Line gate, up;
  gate.pack = ((const Pack*)(p.gate + row * p.gate_stride))[column];
  up.pack = ((const Pack*)(p.up + row * p.up_stride))[column];
#pragma unroll
  for (int j = 0; j < VEC; j++) {
    const float g = act_to_float(gate.each[j]);
    gate.each[j] = float_to_act(g / (1.0f + __expf(-g)) * act_to_float(up.each[j]));
  }
  ((Pack*)(p.out + row * p.out_stride))[column] = gate.pack;
}
