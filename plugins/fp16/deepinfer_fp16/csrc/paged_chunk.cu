// Chunks: several query tokens a request, causal over pages, online softmax on tensor cores.
//
// Block (h, b): query head h, the b-th tile of ROWS query tokens counted over all requests with more than one; late
// tiles, which read the most, come first. A warp takes 16 rows. Keys and values come in tiles of BN tokens through two
// shared-memory stages filled by cp.async; INT8 tiles are widened into one more buffer, scaled in float32 and rounded
// once. Rows in shared memory are padded by 16 bytes, so that ldmatrix meets no bank twice.
#include "paged.cuh"

#define WARPS 4
#define ROWS (16 * WARPS)
#ifndef BN
#define BN (D == 64 ? 64 : 32)
#endif
#define PITCH (D * 2 + 16)       // bytes of a row of values to multiply
#define LINE (D * ELEMENT)       // bytes of a row in the cache
#define STAGE_PITCH (INT8 ? LINE : PITCH)
#define STAGE (2 * BN * STAGE_PITCH)

DI_DEVICE void matrices(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DI_DEVICE void matrices_transposed(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) paged_chunk(const PagedArgs p) {
  __shared__ __align__(128) u8 stages[2 * STAGE];
#if INT8
  __shared__ __align__(128) u8 wide[2 * BN * PITCH];
  __shared__ float scales[2][2][BN];
#endif
  __shared__ int found[2];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  dependents_may_start();
  wait_for_predecessor();

  // Which request and which of its tiles: tiles are counted over the requests.
  if (warp == 0) {
    int left = gridDim.y - 1 - blockIdx.y, request = -1;
    for (int r0 = 0; r0 < p.requests; r0 += 32) {
      const int r = r0 + lane;
      int queries = r < p.requests ? p.query_starts[r + 1] - p.query_starts[r] : 0;
      const int tiles = queries > 1 ? (queries + ROWS - 1) / ROWS : 0;
      int upto = tiles;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
      }
      const u32 hit = __ballot_sync(~0u, left < upto);
      if (hit) {
        const int source = __ffs(hit) - 1;
        request = r0 + source;
        left -= __shfl_sync(~0u, upto - tiles, source);
        break;
      }
      left -= __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) {
      found[0] = request;
      found[1] = left;
    }
  }
  __syncthreads();
  const int request = found[0];
  if (request < 0) return;
  const int start = p.query_starts[request], queries = p.query_starts[request + 1] - start;
  const int len = p.lens[request], row0 = found[1] * ROWS;
  const int rows = min(ROWS, queries - row0);
  const int position0 = len - queries + row0;  // of the block's first row
  const int end = position0 + rows;            // keys that its last row sees
  const int lowest = p.window ? max(0, position0 - p.window + 1) : 0;
  const int begin = lowest / BN * BN;
  const int head = blockIdx.x, kv_head = head / p.group;
  const int* table = p.page_table + (long long)request * p.table_stride;

  // Queries: operand A, rows g and g + 8 of the warp.
  u32 qf[D / 16][4];
  const int warp_row = warp * 16;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = warp_row + g + i * 8;
    const u16* q = p.q + (start + row0 + row) * p.q_stride + head * D + t * 2;
#pragma unroll
    for (int s = 0; s < D / 16; s++) {
      qf[s][i] = row < rows ? *(const u32*)(q + s * 16) : 0u;
      qf[s][i + 2] = row < rows ? *(const u32*)(q + s * 16 + 8) : 0u;
    }
  }
  float acc[D / 8][4];
#pragma unroll
  for (int i = 0; i < D / 2; i++) ((float*)acc)[i] = 0.0f;
  float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, weight[2] = {0.0f, 0.0f};

  const u32 stage0 = smem_address(stages);
  auto fetch = [&](int kv0, int stage) {
    constexpr int pieces = LINE / 16;
#pragma unroll
    for (int i = 0; i < (BN * pieces + WARPS * 32 - 1) / (WARPS * 32); i++) {
      const int e = threadIdx.x + i * WARPS * 32;
      if (BN * pieces % (WARPS * 32) != 0 && e >= BN * pieces) break;
      const int row = e / pieces, piece = e % pieces, at = kv0 + row;
      const bool wanted = at < end && at >= lowest;
      const u64 from = (wanted ? cache_row(table[at / PAGE], at % PAGE, kv_head, p.kv_heads) : 0) * LINE + piece * 16;
      const u32 to = stage0 + stage * STAGE + row * STAGE_PITCH + piece * 16;
      copy16_async_part(to, p.k + from, wanted ? 16 : 0);
      copy16_async_part(to + BN * STAGE_PITCH, p.v + from, wanted ? 16 : 0);
    }
#if INT8
    for (int e = threadIdx.x; e < 2 * BN; e += WARPS * 32) {
      const int at = kv0 + e % BN;
      const bool wanted = at < end && at >= lowest;
      const u64 row = wanted ? cache_row(table[at / PAGE], at % PAGE, kv_head, p.kv_heads) : 0;
      scales[stage][e / BN][e % BN] = wanted ? (e < BN ? p.k_scale : p.v_scale)[row] : 0.0f;
    }
#endif
    copy_commit();
  };

  fetch(begin, 0);
  int stage = 0;
#pragma unroll 1
  for (int kv0 = begin; kv0 < end; kv0 += BN, stage ^= 1) {
    copy_wait<0>();
    __syncthreads();
#if INT8
    for (int e = threadIdx.x; e < 2 * BN * (D / 4); e += WARPS * 32) {
      const int row = e / (D / 4), c = e % (D / 4);  // rows of keys, then of values
      u32 low, high;
      widen4(*(const u32*)(stages + stage * STAGE + row * LINE + c * 4) ^ 0x80808080u, low, high);
      const float scale = ((const float*)scales[stage])[row];
      *(uint2*)(wide + row * PITCH + c * 8) =
          make_uint2(pack_act(act_to_float((u16)low) * scale, act_to_float((u16)(low >> 16)) * scale),
                     pack_act(act_to_float((u16)high) * scale, act_to_float((u16)(high >> 16)) * scale));
    }
    const u32 keys = smem_address(wide), values = keys + BN * PITCH;
#else
    const u32 keys = stage0 + stage * STAGE, values = keys + BN * PITCH;
#endif
    if (kv0 + BN < end) fetch(kv0 + BN, stage ^ 1);
#if INT8
    __syncthreads();
#endif
    // Nothing here for a warp without rows, or whose rows all come before these keys.
    const bool busy = warp_row < rows && kv0 < position0 + warp_row + 16;
    if (busy) {
      float s[BN / 8][4];
#pragma unroll
      for (int i = 0; i < BN / 2; i++) ((float*)s)[i] = 0.0f;
      const u32 key = keys + ((lane & 7) + (lane >> 4) * 8) * PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
      for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int n = 0; n < BN / 16; n++) {
          u32 b[4];
          matrices(b, key + n * 16 * PITCH + k * 32);
          mma16816(s[n * 2], qf[k], b[0], b[1]);
          mma16816(s[n * 2 + 1], qf[k], b[2], b[3]);
        }
      const int last0 = position0 + warp_row + g;  // position of row g; that of row g + 8 is 8 more
      const bool inside = kv0 + BN - 1 <= position0 + warp_row && kv0 + BN <= end &&
                          (p.window == 0 || kv0 > position0 + warp_row + 15 - p.window);
#pragma unroll
      for (int n = 0; n < BN / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = kv0 + n * 8 + t * 2 + (i & 1), last = last0 + (i >> 1) * 8;
          const bool seen = inside || (at <= last && at < end && (p.window == 0 || at > last - p.window));
          s[n][i] = seen ? s[n][i] * p.scale : MINUS_INFINITY;
        }
      u32 pf[BN / 8][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float m = top[i];
#pragma unroll
        for (int n = 0; n < BN / 8; n++) m = fmaxf(m, fmaxf(s[n][i * 2], s[n][i * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float base = m == MINUS_INFINITY ? 0.0f : m;
        const float shrink = exp2_fast(top[i] - base);
        top[i] = m;
        weight[i] *= shrink;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
          const float a = exp2_fast(s[n][i * 2] - base), b = exp2_fast(s[n][i * 2 + 1] - base);
          weight[i] += a + b;
          pf[n][i] = pack_act(a, b);
        }
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
          acc[d][i * 2] *= shrink;
          acc[d][i * 2 + 1] *= shrink;
        }
      }
      const u32 value = values + ((lane & 7) + (lane >> 3 & 1) * 8) * PITCH + (lane >> 4) * 16;
#pragma unroll
      for (int n = 0; n < BN / 16; n++) {
        const u32 a[4] = {pf[n * 2][0], pf[n * 2][1], pf[n * 2 + 1][0], pf[n * 2 + 1][1]};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
          u32 b[4];
          matrices_transposed(b, value + n * 16 * PITCH + d * 32);
          mma16816(acc[d * 2], a, b[0], b[1]);
          mma16816(acc[d * 2 + 1], a, b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float l = weight[i];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const int row = warp_row + g + i * 8;
    if (row >= rows) continue;
    const float f = l > 0.0f ? 1.0f / l : 0.0f;
    u16* out = p.out + (start + row0 + row) * p.out_stride + head * D + t * 2;
#pragma unroll
    for (int d = 0; d < D / 8; d++)
      *(u32*)(out + d * 8) = pack_act(acc[d][i * 2] * f, acc[d][i * 2 + 1] * f);
  }
}
