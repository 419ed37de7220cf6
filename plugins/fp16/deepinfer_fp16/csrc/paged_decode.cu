// One query token a request: the heads of a kv head share one read of its keys and values.
//
// Block (s, y, r): split s of the context, kv head y / head tiles, request r. A warp takes every WARPS-th tile of 16
// tokens, straight from global memory to registers, in the order of the tensor cores' operands: scores transposed,
// S^T[16 tokens, 8 heads] = K Q^T, and O^T[dims, 8 heads] = V^T P^T. Which dimension stands where in a product may be
// chosen freely as long as both operands agree, so a lane reads whole 16 bytes of a row. Warps meet in shared memory;
// splits meet in the workspace, where the last one to arrive adds them in order: the same launch gives the same bits.
// Requests with another number of tokens than one are left alone.
//
// NT: tiles of 8 heads (1 or 2).
#include "paged.cuh"

#define WARPS 4
#define HEADS (8 * NT)
#define MAX_SPLITS 64

// A lane's share of a row of keys (4 lanes a row) and of values (8 lanes a row), in dims an access.
#define K_DIMS (INT8 ? (D % 64 == 0 ? 16 : 8) : 8)
#define K_CHUNKS (D / (4 * K_DIMS))
#define K_BYTES (K_DIMS * ELEMENT)
#define V_DIMS (INT8 ? (D % 128 == 0 ? 16 : D % 64 == 0 ? 8 : 4) : (D % 64 == 0 ? 8 : 4))
#define V_CHUNKS (D / (8 * V_DIMS))
#define V_BYTES (V_DIMS * ELEMENT)
#define PART (HEADS * (D + 2))  // floats of one split: sums, then maximum and weight of each head

DI_DEVICE u32 transpose8x8(u32 a) {
  u32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
  return d;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) paged_decode(const PagedArgs p) {
  __shared__ float sums[WARPS][HEADS][D + 4];
  __shared__ float tops[WARPS][HEADS], weights[WARPS][HEADS];
  __shared__ float factors[MAX_SPLITS][HEADS], totals[HEADS];
  __shared__ u32 arrived;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  dependents_may_start();
  wait_for_predecessor();

  const int request = blockIdx.z;
  const int token = p.query_starts[request];
  if (p.query_starts[request + 1] - token != 1) return;
  const int len = p.lens[request];
  const int head_tiles = (p.group + HEADS - 1) / HEADS;
  const int kv_head = blockIdx.y / head_tiles, head0 = blockIdx.y % head_tiles * HEADS;
  const int heads = min(HEADS, p.group - head0);
  const u16* q = p.q + token * p.q_stride + (kv_head * p.group + head0) * D;
  u16* out = p.out + token * p.out_stride + (kv_head * p.group + head0) * D;
  const int first = p.window ? max(0, len - p.window) : 0;
  int begin, split;
  if (p.split) {  // a split is the same tokens whatever else is in the batch
    split = p.split;
    begin = first / split * split;
  } else {
    begin = first & ~15;
    split = ((len - begin + (int)gridDim.x - 1) / (int)gridDim.x + 63) & ~63;
  }
  const int used = len > 0 ? (len - begin + split - 1) / split : 0;
  if (used == 0 && blockIdx.x == 0)
    for (int e = threadIdx.x; e < heads * D; e += WARPS * 32) out[e] = 0;
  if ((int)blockIdx.x >= used) return;
  const int t0 = begin + blockIdx.x * split, t1 = min(len, t0 + split);

  u32 qf[NT][D / 16][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < K_CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < K_DIMS; i += 8)
        load_or_zero<16>(&qf[n][(c * K_DIMS + i) / 4][0],
                         (const u8*)(q + (n * 8 + g) * D + c * 4 * K_DIMS + t * K_DIMS + i), n * 8 + g < heads);

  float acc[NT][V_CHUNKS][V_DIMS / 2][4];
#pragma unroll
  for (int i = 0; i < NT * V_CHUNKS * V_DIMS * 2; i++) ((float*)acc)[i] = 0.0f;
  float top[NT][2], weight[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      top[n][i] = MINUS_INFINITY;
      weight[n][i] = 0.0f;
    }

  const int tiles = (t1 - t0 + 15) >> 4, mine = tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;
  const int* table = p.page_table + (long long)request * p.table_stride;
  int ids = 0;  // lane l: page of this warp's tile l
  auto fetch_ids = [&](int tile) {
    const int at = t0 + (warp + (tile + lane) * WARPS) * 16;
    ids = at < t1 ? table[at / PAGE] : 0;
  };
  auto row_of = [&](int tile) {  // of the tile's first token
    const int at = t0 + (warp + tile * WARPS) * 16;
    return cache_row(__shfl_sync(~0u, ids, tile & 31), at % PAGE, kv_head, p.kv_heads);
  };
  u32 kw[2][K_CHUNKS][K_BYTES / 4], vw[4][V_CHUNKS][V_BYTES / 4];
#if INT8
  float k_scale[2], v_scale[2];
#endif
  auto load_keys = [&](u64 row, int at) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int o = g + i * 8;
      const bool wanted = at + o < t1 && at + o >= first;
#if INT8
      k_scale[i] = wanted ? p.k_scale[row + o] : 0.0f;
#endif
#pragma unroll
      for (int c = 0; c < K_CHUNKS; c++)
        load_or_zero<K_BYTES>(kw[i][c], p.k + ((row + o) * D + c * 4 * K_DIMS + t * K_DIMS) * ELEMENT, wanted);
    }
  };
  auto load_values = [&](u64 row, int at) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int o = t * 2 + (i & 1) + (i >> 1) * 8;
      const bool wanted = at + o < t1 && at + o >= first;
#pragma unroll
      for (int c = 0; c < V_CHUNKS; c++)
        load_or_zero<V_BYTES>(vw[i][c], p.v + ((row + o) * D + c * 8 * V_DIMS + g * V_DIMS) * ELEMENT, wanted);
    }
#if INT8
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int o = g + i * 8;
      v_scale[i] = at + o < t1 && at + o >= first ? p.v_scale[row + o] * LIFT : 0.0f;
    }
#endif
  };
  if (mine) {
    fetch_ids(0);
    const u64 row = row_of(0);
    load_keys(row, t0 + warp * 16);
    load_values(row, t0 + warp * 16);
  }
#pragma unroll 1
  for (int tile = 0; tile < mine; tile++) {
    const int at = t0 + (warp + tile * WARPS) * 16;
    float s[NT][4];
#pragma unroll
    for (int i = 0; i < NT * 4; i++) ((float*)s)[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < K_CHUNKS; c++)
#pragma unroll
      for (int j = 0; j < K_DIMS / 4; j++) {
        u32 a[4];
#if INT8
#pragma unroll
        for (int i = 0; i < 2; i++) widen4(kw[i][c][j] ^ 0x80808080u, a[i], a[i + 2]);
#else
#pragma unroll
        for (int i = 0; i < 2; i++) {
          a[i] = kw[i][c][j * 2];
          a[i + 2] = kw[i][c][j * 2 + 1];
        }
#endif
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const u32* b = qf[n][c * (K_DIMS / 4) + j];
          mma16816(s[n], a, b[0], b[1]);
        }
      }
    bool seen[2];
#pragma unroll
    for (int i = 0; i < 2; i++) seen[i] = at + g + i * 8 < t1 && at + g + i * 8 >= first;
#if INT8
    const float scale[2] = {p.scale * k_scale[0], p.scale * k_scale[1]};
#else
    const float scale[2] = {p.scale, p.scale};
#endif
    u64 next = 0;
    const bool more = tile + 1 < mine;
    if (more) {  // the next keys are on their way while these scores become weights
      if (((tile + 1) & 31) == 0) fetch_ids(tile + 1);
      next = row_of(tile + 1);
      load_keys(next, at + WARPS * 16);
    }
    u32 pf[NT][2];
    float shrink[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float w[2][2];  // [token half][head]
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float low = seen[0] ? s[n][h] * scale[0] : MINUS_INFINITY;
        const float high = seen[1] ? s[n][2 + h] * scale[1] : MINUS_INFINITY;
        float m = fmaxf(low, high);
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
        m = fmaxf(m, top[n][h]);
        const float base = m == MINUS_INFINITY ? 0.0f : m;
        shrink[n][h] = exp2_fast(top[n][h] - base);
        top[n][h] = m;
        w[0][h] = exp2_fast(low - base);
        w[1][h] = exp2_fast(high - base);
        weight[n][h] = weight[n][h] * shrink[n][h] + (w[0][h] + w[1][h]);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
#if INT8
        w[i][0] *= v_scale[i];
        w[i][1] *= v_scale[i];
#endif
        pf[n][i] = transpose8x8(pack_act(w[i][0], w[i][1]));
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < V_CHUNKS; c++)
#pragma unroll
        for (int m = 0; m < V_DIMS / 2; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) acc[n][c][m][i] *= shrink[n][i & 1];
#pragma unroll
    for (int c = 0; c < V_CHUNKS; c++) {
#if INT8
#pragma unroll
      for (int j = 0; j < V_DIMS / 4; j++) {  // four dims of four tokens
        u32 a[2][4];
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          const u32 x = vw[pair * 2][c][j] ^ 0x80808080u, y = vw[pair * 2 + 1][c][j] ^ 0x80808080u;
          widen4(permute(x, y, 0x5140u), a[0][pair * 2], a[0][pair * 2 + 1]);
          widen4(permute(x, y, 0x7362u), a[1][pair * 2], a[1][pair * 2 + 1]);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          mma16816(acc[n][c][j * 2], a[0], pf[n][0], pf[n][1]);
          mma16816(acc[n][c][j * 2 + 1], a[1], pf[n][0], pf[n][1]);
        }
      }
#else
#pragma unroll
      for (int m = 0; m < V_DIMS / 2; m++) {
        u32 a[4];
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          a[pair * 2] = permute(vw[pair * 2][c][m], vw[pair * 2 + 1][c][m], 0x5410u);
          a[pair * 2 + 1] = permute(vw[pair * 2][c][m], vw[pair * 2 + 1][c][m], 0x7632u);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) mma16816(acc[n][c][m], a, pf[n][0], pf[n][1]);
      }
#endif
    }
    if (more) load_values(next, at + WARPS * 16);
  }

  // Warps of the block.
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      weight[n][h] += __shfl_xor_sync(~0u, weight[n][h], 4);
      weight[n][h] += __shfl_xor_sync(~0u, weight[n][h], 8);
      weight[n][h] += __shfl_xor_sync(~0u, weight[n][h], 16);
      if (g == 0) {
        tops[warp][n * 8 + t * 2 + h] = top[n][h];
        weights[warp][n * 8 + t * 2 + h] = weight[n][h];
      }
#pragma unroll
      for (int c = 0; c < V_CHUNKS; c++)
#pragma unroll
        for (int m = 0; m < V_DIMS / 2; m++)
          *(float2*)&sums[warp][n * 8 + t * 2 + h][c * 8 * V_DIMS + g * V_DIMS + m * 2] =
              make_float2(acc[n][c][m][h], acc[n][c][m][2 + h]);
    }
  __syncthreads();
  const bool alone = used == 1;
  float* part = p.part + (((long long)request * gridDim.y + blockIdx.y) * gridDim.x) * PART;
  float* own = part + (long long)blockIdx.x * PART;
  for (int e = threadIdx.x; e < heads * (D / 4); e += WARPS * 32) {
    const int h = e / (D / 4), d = e % (D / 4) * 4;
    float m = tops[0][h];
#pragma unroll
    for (int w = 1; w < WARPS; w++) m = fmaxf(m, tops[w][h]);
    float l = 0.0f;
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2_fast(tops[w][h] - m);
      const float4 x = *(const float4*)&sums[w][h][d];
      l += f * weights[w][h];
      o.x += f * x.x;
      o.y += f * x.y;
      o.z += f * x.z;
      o.w += f * x.w;
    }
    if (alone) {
      const float f = 1.0f / (l * LIFT);
      *(uint2*)(out + h * D + d) = make_uint2(pack_act(o.x * f, o.y * f), pack_act(o.z * f, o.w * f));
    } else {
      *(float4*)(own + h * D + d) = o;
      if (d == 0) *(float2*)(own + HEADS * D + h * 2) = make_float2(m, l);
    }
  }
  if (alone) return;

  // Splits of the request.
  const int ticket = request * gridDim.y + blockIdx.y;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(p.tickets + ticket, 1u);
  __syncthreads();
  if (arrived != (u32)used - 1) return;
  __threadfence();
  if (threadIdx.x == 0) p.tickets[ticket] = 0;
  for (int h = warp; h < heads; h += WARPS) {
    float m[2], l[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      m[i] = MINUS_INFINITY;
      l[i] = 0.0f;
      if (lane + i * 32 < used) {
        const float* from = part + (long long)(lane + i * 32) * PART + HEADS * D + h * 2;
        m[i] = __ldcg(from);
        l[i] = __ldcg(from + 1);
      }
    }
    float most = fmaxf(m[0], m[1]);
#pragma unroll
    for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float f = exp2_fast(m[i] - most);
      if (lane + i * 32 < used) factors[lane + i * 32][h] = f;
      total += f * l[i];
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
    if (lane == 0) totals[h] = 1.0f / (total * LIFT);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < heads * (D / 4); e += WARPS * 32) {
    const int h = e / (D / 4), d = e % (D / 4) * 4;
    float4 o = make_float4(0, 0, 0, 0);
    const float* from = part + h * D + d;
#pragma unroll 8
    for (int i = 0; i < used; i++) {
      const float4 x = global_load_l2(from + (long long)i * PART);
      const float f = factors[i][h];
      o.x += f * x.x;
      o.y += f * x.y;
      o.z += f * x.z;
      o.w += f * x.w;
    }
    const float f = totals[h];
    *(uint2*)(out + h * D + d) = make_uint2(pack_act(o.x * f, o.y * f), pack_act(o.z * f, o.w * f));
  }
}
