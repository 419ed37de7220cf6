// What the paged attention kernels share: the argument, addresses in the cache, INT8 codes to pairs of 16-bit values.
//
// Cache of a layer: k and v [pages][kv_heads][PAGE][D], so that a page of one head is contiguous; for INT8 also
// k_scale and v_scale float32 [pages][kv_heads][PAGE]. Macros: D, PAGE (a multiple of 16), INT8, BF16.
#pragma once
#include "ptx.cuh"

struct PagedArgs {
  const u16* q;
  u16* out;
  const u8* k;
  const u8* v;
  const float* k_scale;
  const float* v_scale;
  const int* page_table;
  const int* lens;
  const int* query_starts;
  float* part;   // decode: sums of the splits
  u32* tickets;  // decode: arrivals of the splits, left at zero
  long long q_stride, out_stride;  // elements from token to token
  int table_stride, requests, heads, kv_heads;
  int group;    // query heads of one kv head
  int window;   // tokens that a query may look back over, itself included; 0: all
  int split;    // decode: tokens of a split, or 0 to divide each context by the grid
  float scale;  // softmax scale times log2(e)
};

#define MINUS_INFINITY __int_as_float(0xff800000)
#define ELEMENT (INT8 ? 1 : 2)
// What INT8 probabilities are multiplied by so that a small value scale does not push them below the normal halves.
#define LIFT (INT8 ? 64.0f : 1.0f)

// Row of one token and kv head, counted in rows; beyond 32 bits in a large pool.
DI_DEVICE u64 cache_row(int page, int offset, int head, int kv_heads) {
  return ((u64)page * kv_heads + head) * PAGE + offset;
}

DI_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

DI_DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

DI_DEVICE u32 pack_act(float lo, float hi) {
  u32 r;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
  return r;
}

// Four codes, each with its sign bit turned (code + 128), to two pairs of values, exactly.
DI_DEVICE void widen4(u32 codes, u32& low, u32& high) {
#if BF16
  float f[4];
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = __uint_as_float(permute(codes, 0x4B000000u, 0x7440u | i)) - 8388736.0f;
  low = permute(__float_as_uint(f[0]), __float_as_uint(f[1]), 0x7632u);
  high = permute(__float_as_uint(f[2]), __float_as_uint(f[3]), 0x7632u);
#else
  low = permute(codes, 0x64646464u, 0x4140u);
  high = permute(codes, 0x64646464u, 0x4342u);
  asm("sub.f16x2 %0,%0,%1;" : "+r"(low) : "r"(0x64806480u));
  asm("sub.f16x2 %0,%0,%1;" : "+r"(high) : "r"(0x64806480u));
#endif
}

// BYTES (4, 8 or 16) from global memory, or zeros.
template <int BYTES>
DI_DEVICE void load_or_zero(u32* to, const u8* from, bool wanted) {
#pragma unroll
  for (int i = 0; i < BYTES / 4; i++) to[i] = 0;
  if (!wanted) return;
  if (BYTES == 16)
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else if (BYTES == 8)
    asm volatile("ld.global.v2.u32 {%0,%1},[%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm volatile("ld.global.u32 %0,[%1];" : "=r"(to[0]) : "l"(from));
}
