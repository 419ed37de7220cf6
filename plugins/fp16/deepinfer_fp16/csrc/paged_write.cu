// Norm, rotate and store: a warp takes one head of one token. Queries go back to where they were, keys and values to
// their page, quantized where the cache is INT8. Heads are counted q, k, v; a null q leaves the queries out.
#include "paged.cuh"

struct WriteArgs {
  u16* q;
  const u16* k;
  const u16* v;
  const u16* cosine;  // [tokens, D]; null: no rotation
  const u16* sine;
  const u16* norm;  // [heads + kv_heads, D], or null
  u8* k_cache;
  u8* v_cache;
  float* k_scale;
  float* v_scale;
  const long long* slots;
  long long q_stride, k_stride, v_stride;  // elements from token to token
  int heads, kv_heads;
  float eps;
};

#define WARPS 4

DI_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
DI_DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
DI_DEVICE void unpack_act(u32 pair, float* to) {
  to[0] = act_to_float((u16)pair);
  to[1] = act_to_float((u16)(pair >> 16));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) paged_write(const WriteArgs p) {
  dependents_may_start();
  wait_for_predecessor();
  const int token = blockIdx.y, lane = threadIdx.x & 31;
  const int queries = p.q ? p.heads : 0;
  const int head = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (head >= queries + 2 * p.kv_heads) return;
  const bool is_query = head < queries, is_value = head >= queries + p.kv_heads;
  const int mine = is_query ? head : is_value ? head - queries - p.kv_heads : head - queries;
  const bool active = lane < D / 4;  // lane l: dims 2l, 2l + 1 and their partners half a head on
  const int at = lane * 2;
  const u16* from = is_query ? p.q + token * p.q_stride : is_value ? p.v + token * p.v_stride : p.k + token * p.k_stride;
  from += mine * D;
  const long long slot = p.slots[token];
  float x[4] = {0, 0, 0, 0};
  if (active) {
    unpack_act(*(const u32*)(from + at), x);
    unpack_act(*(const u32*)(from + D / 2 + at), x + 2);
  }
  if (!is_value && p.norm) {
    const float scale = 1.0f / sqrtf(warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]) / D + p.eps);
    if (active) {
      const u16* weight = p.norm + ((is_query ? 0 : p.heads) + mine) * D + at;
      float w[4];
      unpack_act(*(const u32*)weight, w);
      unpack_act(*(const u32*)(weight + D / 2), w + 2);
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] *= scale * w[i];
    }
  }
  if (!is_value && p.cosine && active) {
    float c[2], s[2];
    unpack_act(*(const u32*)(p.cosine + (long long)token * D + at), c);
    unpack_act(*(const u32*)(p.sine + (long long)token * D + D / 2 + at), s);  // the half with the plain sign
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float a = x[i], b = x[i + 2];
      x[i] = a * c[i] - b * s[i];
      x[i + 2] = b * c[i] + a * s[i];
    }
  }
  if (is_query) {
    if (active) {
      u16* to = p.q + token * p.q_stride + mine * D;
      *(u32*)(to + at) = pack_act(x[0], x[1]);
      *(u32*)(to + D / 2 + at) = pack_act(x[2], x[3]);
    }
    return;
  }
  if (slot < 0) return;
  const u64 row = cache_row((int)(slot / PAGE), (int)(slot % PAGE), mine, p.kv_heads);
  u8* to = (is_value ? p.v_cache : p.k_cache) + row * (D * ELEMENT);
#if INT8
  const float scale = warp_max(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])))) / 127.0f;
  const float divisor = fmaxf(scale, 1.17549435e-38f);
  int code[4];
#pragma unroll
  for (int i = 0; i < 4; i++) code[i] = (int)fminf(fmaxf(rintf(x[i] / divisor), -127.0f), 127.0f) & 0xff;
  if (active) {
    *(u16*)(to + at) = (u16)(code[0] | code[1] << 8);
    *(u16*)(to + D / 2 + at) = (u16)(code[2] | code[3] << 8);
  }
  if (lane == 0) (is_value ? p.v_scale : p.k_scale)[row] = scale;
#else
  if (active) {
    *(u32*)(to + at * 2) = pack_act(x[0], x[1]);
    *(u32*)(to + D + at * 2) = pack_act(x[2], x[3]);
  }
#endif
}
