// Codes to mma.m16n8k16 operands without a subtraction.
//
// A code that lies at bit p of a half's mantissa, with the exponent chosen so that bit p counts 1, reads as
// bias + code with bias = 2^(10 - p) (FP16) or 2^(7 - p) (BF16): one lop3 for two weights and nothing else. The bias is
// the same for every feature, so what it adds to a dot product is sum(bias[k] * x[k]): computed once per group of k from
// the activations alone and taken off the FP32 accumulators. Codes are placed high in the mantissa to keep biases small.
//
// A tile is 16 features x 64 k. Lane (g, t) holds fragments f = 0..3; fragment f = 2a + b covers
// k = 32a + 8t + 4b + {0,1,2,3}: register 0 = (feature g, k 0-1), 1 = (g + 8, k 0-1), 2 = (g, k 2-3), 3 = (g + 8, k 2-3).
#pragma once
#include "ptx.cuh"

#ifndef BITS
#define BITS 4
#endif

#define CODE_BYTES (BITS * 256)           // 16 features x 128 k
#define TILE_WORDS (BITS == 4 ? 4 : 3)    // words a lane holds of one 64-k tile
#define SIGNED_ZERO (BITS == 4 ? 8 : 4)   // codes are stored unsigned; without zeros the stored zero is this

#if BITS == 4
// Word of fragment f: nibbles r0.lo r2.lo r1.lo r3.lo r0.hi r2.hi r1.hi r3.hi, rotated left by two. 5 instructions for 8 weights.
template <int F>
DI_DEVICE void decode_fragment(const u32* w, u32* a) {
  const u32 v = w[F], r = rotate_right(v, 8);
#if BF16
  a[0] = mask_or(v, 0x003c003c, 0x42004200);
  a[1] = mask_or(r, 0x003c003c, 0x42004200);
  a[2] = mask_or(v >> 3, 0x00780078, 0x41804180);
  a[3] = mask_or(r >> 3, 0x00780078, 0x41804180);
#else
  a[0] = mask_or(v, 0x003c003c, 0x5c005c00);
  a[1] = mask_or(r, 0x003c003c, 0x5c005c00);
  a[2] = mask_or(v, 0x03c003c0, 0x4c004c00);
  a[3] = mask_or(r, 0x03c003c0, 0x4c004c00);
#endif
}
// Bias of k pair P (0: k 0-1, 1: k 2-3) of fragment F.
template <int F, int P>
DI_DEVICE constexpr int fragment_bias() {
  return BF16 ? (P ? 16 : 32) : (P ? 16 : 256);
}
#else
// Three words hold 16 half-pairs: A B C D E at bits 1 4 7 10 13 of each half, and bit 0 of the three words makes the
// sixteenth, L. 24 instructions for 32 weights.
// Fragment 0: A0 A1 | A2 L. 1: B0 B1 | B2 D2. 2: D0 D1 | C0 C1. 3: C2 E2 | E0 E1 (r0 r1 | r2 r3, the digit is the word).
#if BF16
#define W3_A 0x42804280
#define W3_BD 0x41004100
DI_DEVICE u32 w3_a(u32 w) { return mask_or(w, 0x000e000e, W3_A); }
DI_DEVICE u32 w3_b(u32 w) { return mask_or(w, 0x00700070, W3_BD); }
DI_DEVICE u32 w3_c(u32 w) { return mask_or(w >> 6, 0x000e000e, W3_A); }
DI_DEVICE u32 w3_c2(u32 w) { return mask_or(w >> 3, 0x00700070, W3_BD); }
DI_DEVICE u32 w3_d(u32 w) { return mask_or(w >> 6, 0x00700070, W3_BD); }
DI_DEVICE u32 w3_e(u32 w) { return mask_or(w >> 9, 0x00700070, W3_BD); }
#else
#define W3_A 0x60006000
DI_DEVICE u32 w3_a(u32 w) { return mask_or(w, 0x000e000e, W3_A); }
DI_DEVICE u32 w3_b(u32 w) { return mask_or(w, 0x00700070, 0x54005400); }
DI_DEVICE u32 w3_c(u32 w) { return mask_or(w, 0x03800380, 0x48004800); }
DI_DEVICE u32 w3_c2(u32 w) { return w3_c(w); }
DI_DEVICE u32 w3_d(u32 w) { return mask_or(w >> 6, 0x00700070, 0x54005400); }
DI_DEVICE u32 w3_e(u32 w) { return mask_or(w >> 6, 0x03800380, 0x48004800); }
#endif
template <int F>
DI_DEVICE void decode_fragment(const u32* w, u32* a) {
  if (F == 0) {
    a[0] = w3_a(w[0]);
    a[1] = w3_a(w[1]);
    a[2] = w3_a(w[2]);
    a[3] = mask_or(w[2] << 3, 0x00080008, mask_or(w[1] << 2, 0x00040004, mask_or(w[0] << 1, 0x00020002, W3_A)));
  } else if (F == 1) {
    a[0] = w3_b(w[0]);
    a[1] = w3_b(w[1]);
    a[2] = w3_b(w[2]);
    a[3] = w3_d(w[2]);
  } else if (F == 2) {
    a[0] = w3_d(w[0]);
    a[1] = w3_d(w[1]);
    a[2] = w3_c(w[0]);
    a[3] = w3_c(w[1]);
  } else {
    a[0] = w3_c2(w[2]);
    a[1] = w3_e(w[2]);
    a[2] = w3_e(w[0]);
    a[3] = w3_e(w[1]);
  }
}
template <int F, int P>
DI_DEVICE constexpr int fragment_bias() {
  if (F == 0) return BF16 ? 64 : 512;
  if (F == 1) return BF16 ? 8 : 64;
  if (F == 2) return P ? (BF16 ? 64 : 8) : (BF16 ? 8 : 64);
  return 8;
}
#endif

// Two equal FP16 or BF16 values of a small integer, in one word; worked out by the compiler (a conversion at run time
// would hold a register a constant).
DI_DEVICE constexpr u32 act_pair(int v) {
  const u32 sign = v < 0 ? 0x8000u : 0u, size = v < 0 ? -v : v;
  if (size == 0) return 0;
  int e = 0;
  while (size >> (e + 1)) e++;
  const u32 half = sign | (BF16 ? (u32)(e + 127) << 7 | ((size << 7 >> e) & 0x7f) : (u32)(e + 15) << 10 | ((size << 10 >> e) & 0x3ff));
  return half | half << 16;
}

// Operand whose rows 0-7 hold bias + zero and rows 8-15 ones: one mma gives what the bias adds and sum(x) together.
template <int F, int ZERO>
DI_DEVICE void bias_fragment(u32* a) {
  constexpr u32 first = act_pair(fragment_bias<F, 0>() + ZERO), second = act_pair(fragment_bias<F, 1>() + ZERO);
  a[0] = first;
  a[2] = second;
  a[1] = a[3] = act_pair(1);
}
