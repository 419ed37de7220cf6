// w4a16.gemv (ROWS = 1) and w4a16.batch_tile_gemv (ROWS = 8) over canonical rows.
#define BITS 4
#include "row_gemv.cuh"

__device__ __forceinline__ void read8(const unsigned char* row, int code_bytes, int k, int (&codes)[8]) {
  const int at = k / 2;
  unsigned word = 0;
  if (code_bytes % 4 == 0) {
    word = *reinterpret_cast<const unsigned*>(row + at);  // rows start 4-byte aligned, and so does every eighth code
  } else {
    for (int i = 0; i < 4; i++)
      if (at + i < code_bytes) word |= (unsigned)row[at + i] << (8 * i);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) codes[i] = (word >> (4 * i)) & 15;
}
