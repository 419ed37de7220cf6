// W4 tensor-core kernel for many rows: everything but the number of bits is shared.
#define BITS 4
#include "mma_tile.cuh"
