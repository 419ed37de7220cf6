// w3a16.gemv (ROWS = 1, grid.y = batch) and the experimental w3a16.batch_tile_gemv (ROWS = 8) over canonical rows.
#define BITS 3
#include "row_gemv.cuh"

__device__ __forceinline__ void read8(const unsigned char* row, int code_bytes, int k, int (&codes)[8]) {
  const unsigned char* at = row + k / 8 * 3;  // eight codes fill three bytes exactly, so none lies past the row's end
  const unsigned word = at[0] | (unsigned)at[1] << 8 | (unsigned)at[2] << 16;
#pragma unroll
  for (int i = 0; i < 8; i++) codes[i] = (word >> (3 * i)) & 7;
}
