// Fragment-order records to plain rows, for decode-chunk + cuBLAS at large M: bound by writing two bytes a weight, so the
// arithmetic is the plainest there is (float32, rounded once: the same bits as the reference).
#pragma once
#include "decode.cuh"

#ifndef GROUP
#define GROUP 128
#endif
#ifndef ZEROS
#define ZEROS 0
#endif

#define SUBS (128 / GROUP)
#define GROUP_BYTES (SUBS * 32 * (1 + ZEROS))

// Two weights of one register: bias off, zero off, times scale.
template <int BIAS>
DI_DEVICE u32 value_pair(u32 raw, float zero, float scale) {
  const float lo = (act_to_float((u16)raw) - BIAS - zero) * scale;
  const float hi = (act_to_float((u16)(raw >> 16)) - BIAS - zero) * scale;
  return float_to_act(lo) | (u32)float_to_act(hi) << 16;
}

// Fragments 2A and 2A + 1: eight k of feature g (even registers) and of feature g + 8 (odd registers).
template <int A>
DI_DEVICE void value_octets(const u32* w, const float* zero, const float* scale, uint4* out) {
  u32 a[4], b[4];
  decode_fragment<2 * A>(w, a);
  decode_fragment<2 * A + 1>(w, b);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    out[i].x = value_pair<fragment_bias<2 * A, 0>()>(a[i], zero[i], scale[i]);
    out[i].y = value_pair<fragment_bias<2 * A, 1>()>(a[i + 2], zero[i], scale[i]);
    out[i].z = value_pair<fragment_bias<2 * A + 1, 0>()>(b[i], zero[i], scale[i]);
    out[i].w = value_pair<fragment_bias<2 * A + 1, 1>()>(b[i + 2], zero[i], scale[i]);
  }
}

// out[n - n0][k], ld elements between rows. One warp a record; grid.x covers units in steps of four warps, grid.y tiles.
extern "C" __global__ void __launch_bounds__(128) mma_dequantize(const u8* codes, const u8* groups, u16* out, int n0, int n1,
                                                                 int k, int units, int ld) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int unit = blockIdx.x * 4 + (threadIdx.x >> 5), tile = n0 / 16 + blockIdx.y;
  if (unit >= units) return;
  const u64 record = (u64)tile * units + unit;
  const u8* c = codes + record * CODE_BYTES;
  const u8* q = groups + record * GROUP_BYTES;
  u32 w[2][TILE_WORDS];
#if BITS == 4
#pragma unroll
  for (int i = 0; i < 2; i++) *(uint4*)w[i] = *(const uint4*)(c + i * 512 + lane * 16);
#else
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const uint2 v = *(const uint2*)(c + i * 256 + lane * 8);
    w[0][i] = v.x;
    w[1][i] = v.y;
  }
#endif
  const bool whole = ((ld & 7) | (int)((u64)out & 15)) == 0;
#pragma unroll
  for (int h = 0; h < 4; h++) {
    const int sub = h * 32 / GROUP;
    const u32 s = *(const u32*)(q + sub * 32 + g * 4);
    const float scale[2] = {half_to_float((u16)s), half_to_float((u16)(s >> 16))};
    float zero[2] = {SIGNED_ZERO, SIGNED_ZERO};
#if ZEROS
    const u32 z = *(const u32*)(q + (SUBS + sub) * 32 + g * 4);
    zero[0] = half_to_float((u16)z);
    zero[1] = half_to_float((u16)(z >> 16));
#endif
    uint4 v[2];
    if (h & 1)
      value_octets<1>(w[h >> 1], zero, scale, v);
    else
      value_octets<0>(w[h >> 1], zero, scale, v);
    const int at = unit * 128 + h * 32 + t * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int n = tile * 16 + g + i * 8;
      if (n < n0 || n >= n1) continue;
      u16* row = out + (u64)(n - n0) * ld + at;
      if (whole && at + 8 <= k) {
        *(uint4*)row = v[i];
      } else {
        const u32* e = (const u32*)&v[i];
#pragma unroll
        for (int j = 0; j < 8; j++)
          if (at + j < k) row[j] = (u16)(e[j >> 1] >> (16 * (j & 1)));
      }
    }
  }
}
