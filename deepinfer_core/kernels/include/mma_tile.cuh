// y[M, N] = x[M, K] W^T for M from about 17: activations through shared memory in cp.async stages that all warps of a
// block share, weights from global memory straight to registers two records ahead, stream-K over (feature tile, k).
//
// Every block takes an equal run of units, so no wave is left half empty. A feature tile that several blocks share is
// finished by the last of them to arrive, which adds the partial sums in block order: the same launch gives the same bits.
// A step is KW records of k, one for each KW-th of the block's warps, whose sums meet in shared memory: fewer, longer
// runs a block, so fewer tiles are shared.
// Symmetric codes only: the bias of the decoded operand is subtracted exactly, on the FMA pipe, which is idle here.
#pragma once
#include "decode.cuh"

#ifndef GROUP
#define GROUP 128
#endif
#ifndef NT  // row tiles of 8
#define NT 4
#endif
#ifndef FT  // feature tiles of 16 a warp
#define FT 2
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef KW  // warps a feature tile: each takes every KW-th record of k
#define KW 1
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef MINB
#define MINB 3
#endif

#define SUBS (128 / GROUP)
#define GROUP_BYTES (SUBS * 32)
#define TILE_M (8 * NT)
#define THREADS (WARPS * 32)
#define WN (WARPS / KW)
#define SUM_THREADS (WN * 32)  // those that hold a tile's sums
#define X_STRIDE 320  // bytes a row of a stage: 256 and 64, so that 16-byte reads of 8 rows hit every bank once

struct TileArgs {
  const u8* codes;
  const u8* groups;
  const u16* x;
  u16* y;
  const u16* bias;
  const u16* residual;
  float* partial;  // [z][block][head, tail][FT * NT][SUM_THREADS][4]
  u32* tickets;    // [z][feature tile], zero before and after
  int m, n, k, ldx;
  int tiles16, units;
  int steps;       // of a feature tile: ceil(units / KW)
  int share;       // steps a block
};

#if BITS == 4
#define PIECES 2
typedef uint4 piece_t;
#else
#define PIECES 3
typedef uint2 piece_t;
#endif

struct Unit {
  piece_t codes[FT][PIECES];
  u32 scales[FT][SUBS];
};

DI_DEVICE piece_t stream_piece(const u8* p) {
  piece_t v;
#if BITS == 4
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
#else
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
#endif
  return v;
}

template <int BIAS>
DI_DEVICE u32 take_off(u32 a) {
  u32 r;
  constexpr u32 off = act_pair(BF16 ? -(BIAS + SIGNED_ZERO) : BIAS + SIGNED_ZERO);
#if BF16
  // 8.x has no bf16 subtraction: a * 1 - bias
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(0x3f803f80), "r"(off));
#else
  asm("sub.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(off));
#endif
  return r;
}

template <int F>
DI_DEVICE void tile_step(float (*c)[4], const u32* w, const uint4* xv) {
  u32 a[4];
  decode_fragment<F>(w, a);
  a[0] = take_off<fragment_bias<F, 0>()>(a[0]);
  a[1] = take_off<fragment_bias<F, 0>()>(a[1]);
  a[2] = take_off<fragment_bias<F, 1>()>(a[2]);
  a[3] = take_off<fragment_bias<F, 1>()>(a[3]);
#pragma unroll
  for (int j = 0; j < NT; j++) mma16816(c[j], a, F & 1 ? xv[j].z : xv[j].x, F & 1 ? xv[j].w : xv[j].y);
}

extern "C" __global__ void __launch_bounds__(THREADS, MINB) mma_tile(const TileArgs p) {
  extern __shared__ __align__(128) u8 xs[];  // [STAGES][KW][TILE_M][X_STRIDE], then [KW - 1][FT * NT][SUM_THREADS] float4
  __shared__ u32 arrived;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int wn = warp % WN, kw = warp / WN;
  constexpr int F = WN * FT;
  const int total = (p.tiles16 + F - 1) / F * p.steps;
  const int u0 = blockIdx.x * p.share, u1 = min(u0 + p.share, total);
  const int m0 = blockIdx.z * TILE_M, rows = min(p.m - m0, TILE_M);
  const u32 xs0 = smem_address(xs);
  const u16* x = p.x + (u64)m0 * p.ldx;
  const bool aligned = ((p.ldx & 7) | (int)((u64)p.x & 15)) == 0;

  int stage_k = u0 % p.steps;
  auto load_x = [&](int u, int slot) {
    if (u < u1) {
      const int k = stage_k * (128 * KW);
      if (++stage_k == p.steps) stage_k = 0;
#pragma unroll
      for (int i = threadIdx.x; i < KW * TILE_M * 16; i += THREADS) {
        const int part = i / (TILE_M * 16), r = i / 16 % TILE_M, at = k + part * 128 + (i & 15) * 8;
        const int left = r < rows ? max(0, min(p.k - at, 8)) : 0;
        const u32 dst = ((slot * KW + part) * TILE_M + r) * X_STRIDE + (i & 15) * 16;
        const u16* src = x + (u64)r * p.ldx + at;
        if (aligned) {
          copy16_async_part(xs0 + dst, left ? src : p.x, left * 2);
        } else {
#pragma unroll 1
          for (int e = 0; e < 8; e++) ((u16*)(xs + dst))[e] = e < left ? ((const volatile u16*)src)[e] : (u16)0;
        }
      }
    }
    copy_commit();
  };
  int fetch_tile = u0 / p.steps, fetch_k = u0 - fetch_tile * p.steps;
  auto load_w = [&](int u, Unit& b) {
    if (u < u1) {
#pragma unroll
      for (int f = 0; f < FT; f++) {
        // Behind the last record of k, x is zero and the weights do not matter.
        const u64 record = (u64)min((fetch_tile * WN + wn) * FT + f, p.tiles16 - 1) * p.units +
                           (KW == 1 ? fetch_k : min(fetch_k * KW + kw, p.units - 1));
        const u8* c = p.codes + record * CODE_BYTES + lane * sizeof(piece_t);
#pragma unroll
        for (int i = 0; i < PIECES; i++) b.codes[f][i] = stream_piece(c + i * (32 * sizeof(piece_t)));
#pragma unroll
        for (int s = 0; s < SUBS; s++) b.scales[f][s] = *(const u32*)(p.groups + record * GROUP_BYTES + s * 32 + g * 4);
      }
      if (++fetch_k == p.steps) {
        fetch_k = 0;
        fetch_tile++;
      }
    }
  };

  Unit ahead[2];
  load_w(u0, ahead[0]);
  load_w(u0 + 1, ahead[1]);
  dependents_may_start();
  wait_for_predecessor();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) load_x(u0 + s, s);

  float acc[FT][NT][4];
#pragma unroll
  for (int i = 0; i < FT * NT * 4; i++) ((float*)acc)[i] = 0;
  int slot = 0, tile = u0 / p.steps, k = u0 - tile * p.steps;
  bool head = true;

  auto emit = [&]() {
#pragma unroll
    for (int f = 0; f < FT; f++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int n = ((tile * WN + wn) * FT + f) * 16 + g + (i >> 1) * 8;
        const float b = p.bias && n < p.n ? act_to_float(p.bias[n]) : 0.0f;
#pragma unroll
        for (int j = 0; j < NT; j++) {
          const int m = j * 8 + t * 2 + (i & 1);
          if (m < rows && n < p.n) {
            const u64 at = (u64)(m0 + m) * p.n + n;
            float v = acc[f][j][i] + b;
            if (p.residual) v += act_to_float(p.residual[at]);
            p.y[at] = float_to_act(v);
          }
        }
      }
  };

  // Part of a tile: leave it in memory; whoever comes last adds all parts in block order.
  auto meet = [&]() {
    const int part_floats = FT * NT * SUM_THREADS * 4;
    float* parts = p.partial + (u64)blockIdx.z * gridDim.x * 2 * part_floats + threadIdx.x * 4;
    if (kw == 0) {
      float* mine = parts + (u64)(blockIdx.x * 2 + (head ? 0 : 1)) * part_floats;
#pragma unroll
      for (int q = 0; q < FT * NT; q++) *(float4*)(mine + q * (SUM_THREADS * 4)) = *(float4*)((float*)acc + q * 4);
    }
    const int first = tile * p.steps / p.share, last = ((tile + 1) * p.steps - 1) / p.share;
    __threadfence();
    __syncthreads();
    u32* ticket = p.tickets + (u64)blockIdx.z * (total / p.steps) + tile;
    if (threadIdx.x == 0) {
      arrived = atomicAdd(ticket, 1u);
      if ((int)arrived == last - first) *ticket = 0;
    }
    __syncthreads();
    if ((int)arrived != last - first || kw != 0) return;
    __threadfence();
#pragma unroll
    for (int i = 0; i < FT * NT * 4; i++) ((float*)acc)[i] = 0;
#pragma unroll 1
    for (int b = first; b <= last; b++) {
      const float* part = parts + (u64)(b * 2 + (b * p.share >= tile * p.steps ? 0 : 1)) * part_floats;
#pragma unroll
      for (int q0 = 0; q0 < FT * NT; q0 += 4) {  // four loads in flight
        float4 v[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
          if (q0 + q < FT * NT) v[q] = global_load_l2(part + (q0 + q) * (SUM_THREADS * 4));
#pragma unroll
        for (int q = 0; q < 4; q++)
          if (q0 + q < FT * NT) {
            float* a = (float*)acc + (q0 + q) * 4;
            a[0] += v[q].x;
            a[1] += v[q].y;
            a[2] += v[q].z;
            a[3] += v[q].w;
          }
      }
    }
    emit();
  };

  // Sums of the KW warps of a feature tile, in order, into the first of them.
  auto gather = [&]() {
    if (KW == 1) return;
    float4* red = (float4*)(xs + STAGES * KW * TILE_M * X_STRIDE) + wn * 32 + lane;
    if (kw > 0) {
#pragma unroll
      for (int q = 0; q < FT * NT; q++)
        red[((kw - 1) * FT * NT + q) * SUM_THREADS] = *(float4*)((float*)acc + q * 4);
    }
    __syncthreads();
    if (kw == 0) {
#pragma unroll
      for (int o = 0; o < KW - 1; o++)
#pragma unroll
        for (int q = 0; q < FT * NT; q++) {
          const float4 v = red[(o * FT * NT + q) * SUM_THREADS];
          float* a = (float*)acc + q * 4;
          a[0] += v.x;
          a[1] += v.y;
          a[2] += v.z;
          a[3] += v.w;
        }
    }
  };

  auto step = [&](int u, Unit& b) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    const int next = slot + STAGES - 1;
    load_x(u + STAGES - 1, next >= STAGES ? next - STAGES : next);
    const u8* xr = xs + ((slot * KW + kw) * TILE_M + g) * X_STRIDE + t * 16;
    float c[FT][NT][4];
#pragma unroll
    for (int h = 0; h < 4; h++) {
      if (h % (GROUP / 32) == 0) {
#pragma unroll
        for (int i = 0; i < FT * NT * 4; i++) ((float*)c)[i] = 0;
      }
      uint4 xv[NT];
#pragma unroll
      for (int j = 0; j < NT; j++) xv[j] = *(const uint4*)(xr + j * 8 * X_STRIDE + h * 64);
#pragma unroll
      for (int f = 0; f < FT; f++) {
#if BITS == 4
        const u32* w = (const u32*)&b.codes[f][h >> 1];
#else
        const u32 w[3] = {h < 2 ? b.codes[f][0].x : b.codes[f][0].y, h < 2 ? b.codes[f][1].x : b.codes[f][1].y,
                          h < 2 ? b.codes[f][2].x : b.codes[f][2].y};
#endif
        if (h & 1) {
          tile_step<2>(c[f], w, xv);
          tile_step<3>(c[f], w, xv);
        } else {
          tile_step<0>(c[f], w, xv);
          tile_step<1>(c[f], w, xv);
        }
      }
      if ((h + 1) % (GROUP / 32) == 0) {
#pragma unroll
        for (int f = 0; f < FT; f++) {
          const u32 s = b.scales[f][h * 32 / GROUP];
          const float s0 = half_to_float((u16)s), s1 = half_to_float((u16)(s >> 16));
#pragma unroll
          for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[f][j][i] += c[f][j][i] * (i < 2 ? s0 : s1);
        }
      }
    }
    load_w(u + 2, b);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    const bool tile_ends = ++k == p.steps;
    if (tile_ends || u + 1 == u1) {
      gather();
      if (!tile_ends || u + 1 - p.steps < u0)
        meet();
      else if (kw == 0)
        emit();
#pragma unroll
      for (int i = 0; i < FT * NT * 4; i++) ((float*)acc)[i] = 0;
      head = false;
      k = 0;
      tile++;
    }
  };
#pragma unroll 1
  for (int u = u0; u < u1; u += 2) {
    step(u, ahead[0]);
    if (u + 1 < u1) step(u + 1, ahead[1]);
  }
}
