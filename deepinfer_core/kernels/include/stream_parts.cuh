// What a block of mma_stream does with one slice of activations and one record of weights; the loop is in mma_stream.cuh.
#pragma once
#include "decode.cuh"

#ifndef GROUP
#define GROUP 128
#endif
#ifndef ZEROS  // 1: an FP16 zero per group, w = (code - zero) * scale; 0: signed codes
#define ZEROS 0
#endif
#ifndef NT  // row tiles of 8
#define NT 1
#endif
#ifndef FT  // feature tiles of 16 a warp does at once; they share the activations it loads
#define FT 1
#endif
#ifndef WARPS
#define WARPS 16
#endif
#ifndef DEPTH
#define DEPTH 4
#endif
#ifndef MINB
#define MINB 1
#endif
#ifndef CLUSTER  // blocks of a cluster, one a slice of k: their sums meet in shared memory (9.0), not in global memory
#define CLUSTER 1
#endif
#ifndef EVICT
#define EVICT 0
#endif

#define SUBS (128 / GROUP)                            // groups a record
#define GROUP_BYTES (SUBS * 32 * (1 + ZEROS))          // scales of a record, then its zeros
#define RECORD (CODE_BYTES + GROUP_BYTES)
#define STAGE (FT * RECORD)
#define TILE_F (16 * FT)
#define TILE_M (8 * NT)
#define PART_STRIDE (TILE_M + (NT % 2 ? 0 : 8))       // floats a feature of a partial sum; no bank conflicts on store
#define PART_BYTES (TILE_F * PART_STRIDE * 4)
#define RING_BYTES (DEPTH * STAGE > PART_BYTES ? DEPTH * STAGE : PART_BYTES)  // a warp's ring becomes its tail's partial sum
#define THREADS (WARPS * 32)

struct StreamArgs {
  const u8* codes;      // [tiles16][units][CODE_BYTES]
  const u8* groups;     // [tiles16][units][GROUP_BYTES]
  const u16* x;
  u16* y;
  const u16* bias;      // or null
  const u16* residual;  // [M, N] or null
  float* partial;       // gridDim.y > 1: [z][c][s][tiles_per_block][TILE_F][TILE_M]
  u32* tickets;         // gridDim.y > 1: one a (z, c), zero before and after
  int m, n, k, ldx;     // ldx: elements between rows of x
  int tiles16;          // feature tiles of 16 in weights
  int units;            // records a feature tile: ceil(K / 128)
  int tiles_per_block;  // in groups of FT
  int slice;            // records of k a slice
  int early;            // launched before its predecessor has ended
};

// Copies the slice's activations to shared memory, zero behind K; asynchronous, so that one latency covers all of them
// (30 rows copied one after the other cost 11 us). Rows stay STRIDE apart: 64 mod 128 bytes, so that the 16-byte reads
// of 8 rows hit every bank once.
DI_DEVICE void stage_activations(const StreamArgs& p, u8* xs, int m0, int rows, int k0, int nk, int stride) {
  const int chunks = nk * 16;
  const u16* x = p.x + (u64)m0 * p.ldx + k0;
  if (((p.ldx & 7) | (int)((u64)p.x & 15)) == 0) {
    const u32 dst = smem_address(xs);
#pragma unroll 1
    for (int r = 0, c = threadIdx.x;; c += THREADS) {
      while (c >= chunks) {
        c -= chunks;
        r++;
      }
      if (r >= rows) break;
      const int bytes = max(0, min(p.k - k0 - c * 8, 8)) * 2;
      copy16_async_part(dst + r * stride + c * 16, bytes ? x + (u64)r * p.ldx + c * 8 : p.x, bytes);
    }
  } else {  // a row does not start on 16 bytes: element by element
    const int width = chunks * 8;
#pragma unroll 1
    for (int r = 0; r < rows; r++)
#pragma unroll 1
      for (int c = threadIdx.x; c < width; c += THREADS)
        ((u16*)(xs + r * stride))[c] = c < p.k - k0 ? ((const volatile u16*)x)[(u64)r * p.ldx + c] : (u16)0;
  }
  copy_commit();
}

template <int F>
DI_DEVICE void bias_step(float* c, u32 b0, u32 b1) {
  u32 a[4];
  bias_fragment<F, ZEROS ? 0 : SIGNED_ZERO>(a);
  mma16816(c, a, b0, b1);
}

// offsets[unit][sub][{bias, sum}][row]: what the accumulators of a group start from.
DI_DEVICE void group_offsets(float* offsets, const u8* xs, int rows, int nk, int stride) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int job = threadIdx.x >> 5; job < nk * NT; job += WARPS) {
    const int unit = job / NT, j = job - unit * NT;
    const u8* xp = xs + min(j * 8 + g, rows - 1) * stride + unit * 256 + t * 16;
    float c[4][4];
#pragma unroll
    for (int h = 0; h < 4; h++) {  // a chain of two mma each, not one of eight
      c[h][0] = c[h][1] = c[h][2] = c[h][3] = 0;
      const uint4 v = *(const uint4*)(xp + h * 64);
      if (h & 1) {
        bias_step<2>(c[h], v.x, v.y);
        bias_step<3>(c[h], v.z, v.w);
      } else {
        bias_step<0>(c[h], v.x, v.y);
        bias_step<1>(c[h], v.z, v.w);
      }
    }
#pragma unroll
    for (int s = 0; s < SUBS; s++) {
      float* o = offsets + (unit * SUBS + s) * (1 + ZEROS) * TILE_M + j * 8 + t * 2;
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int h = s * (4 / SUBS); h < (s + 1) * (4 / SUBS); h++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += c[h][i];
      if (g == 0) {
        o[0] = -sum[0];
        o[1] = -sum[1];
#if ZEROS
        o[TILE_M] = -sum[2];
        o[TILE_M + 1] = -sum[3];
#endif
      }
    }
  }
}

DI_DEVICE void store_output(const StreamArgs& p, int m, int n, float v) {
  const u64 at = (u64)m * p.n + n;
  if (p.bias) v += act_to_float(p.bias[n]);
  if (p.residual) v += act_to_float(p.residual[at]);
  p.y[at] = float_to_act(v);
}

DI_DEVICE void add_quad(float4& a, const float4 b) {
  a.x += b.x;
  a.y += b.y;
  a.z += b.z;
  a.w += b.w;
}

DI_DEVICE void store_quad(const StreamArgs& p, int m0, int m, int rows, int n, float4 v) {
  if (n >= p.n) return;
  store_output(p, m0 + m, n, v.x);
  if (m + 1 < rows) store_output(p, m0 + m + 1, n, v.y);
  if (m + 2 < rows) store_output(p, m0 + m + 2, n, v.z);
  if (m + 3 < rows) store_output(p, m0 + m + 3, n, v.w);
}

template <int F>
DI_DEVICE void product_step(float (*c)[4], const u32* w, const uint4* xv) {
  u32 a[4];
  decode_fragment<F>(w, a);
#pragma unroll
  for (int j = 0; j < NT; j++) mma16816(c[j], a, F & 1 ? xv[j].z : xv[j].x, F & 1 ? xv[j].w : xv[j].y);
}

// FT records of the same k: acc += scale * (codes * x + offset).
DI_DEVICE void product_unit(float (*acc)[NT][4], const u8* stage, const u8* const* xrow, const float* offset, int lane) {
  const int g = lane >> 2;
  // One feature tile and one row tile would be a single chain of eight dependent mma: make it two.
  constexpr int CHAINS = FT * NT == 1 && GROUP == 128 ? 2 : 1;
  float c[CHAINS][FT][NT][4];
  u32 w[FT][2][TILE_WORDS];
#pragma unroll
  for (int f = 0; f < FT; f++) {
#if BITS == 4
#pragma unroll
    for (int i = 0; i < 2; i++) *(uint4*)w[f][i] = *(const uint4*)(stage + f * RECORD + i * 512 + lane * 16);
#else
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const uint2 v = *(const uint2*)(stage + f * RECORD + i * 256 + lane * 8);
      w[f][0][i] = v.x;
      w[f][1][i] = v.y;
    }
#endif
  }
#pragma unroll
  for (int h = 0; h < 4; h++) {
    const int chain = CHAINS == 2 ? h >> 1 : 0;
    if (CHAINS == 2 && h == 2) {
      c[chain][0][0][0] = c[chain][0][0][1] = c[chain][0][0][2] = c[chain][0][0][3] = 0;
    } else if (h % (GROUP / 32) == 0) {
      const int sub = h * 32 / GROUP;
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const float2 o = *(const float2*)(offset + sub * (1 + ZEROS) * TILE_M + j * 8);
#if ZEROS
        const float2 s = *(const float2*)(offset + (sub * 2 + 1) * TILE_M + j * 8);
#endif
#pragma unroll
        for (int f = 0; f < FT; f++) {
#if ZEROS
          const u32 z = *(const u32*)(stage + f * RECORD + CODE_BYTES + SUBS * 32 + sub * 32 + g * 4);
          const float z0 = half_to_float((u16)z), z1 = half_to_float((u16)(z >> 16));
          c[chain][f][j][0] = o.x + z0 * s.x;
          c[chain][f][j][1] = o.y + z0 * s.y;
          c[chain][f][j][2] = o.x + z1 * s.x;
          c[chain][f][j][3] = o.y + z1 * s.y;
#else
          c[chain][f][j][0] = c[chain][f][j][2] = o.x;
          c[chain][f][j][1] = c[chain][f][j][3] = o.y;
#endif
        }
      }
    }
    uint4 xv[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) xv[j] = *(const uint4*)(xrow[j] + h * 64);
#pragma unroll
    for (int f = 0; f < FT; f++) {
      if ((h & 1) == 0) {
        product_step<0>(c[chain][f], w[f][h >> 1], xv);
        product_step<1>(c[chain][f], w[f][h >> 1], xv);
      } else {
        product_step<2>(c[chain][f], w[f][h >> 1], xv);
        product_step<3>(c[chain][f], w[f][h >> 1], xv);
      }
    }
    if ((h + 1) % (GROUP / 32) == 0) {
      const int sub = h * 32 / GROUP;
#pragma unroll
      for (int f = 0; f < FT; f++) {
        const u32 s = *(const u32*)(stage + f * RECORD + CODE_BYTES + sub * 32 + g * 4);
        const float s0 = half_to_float((u16)s), s1 = half_to_float((u16)(s >> 16));
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            acc[f][j][i] += (CHAINS == 2 ? c[0][f][j][i] + c[CHAINS - 1][f][j][i] : c[0][f][j][i]) * (i < 2 ? s0 : s1);
      }
    }
  }
}
