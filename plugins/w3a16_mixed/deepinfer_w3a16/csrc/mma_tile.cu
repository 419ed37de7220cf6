// W3 tensor-core kernel for many rows: everything but the number of bits is shared.
#define BITS 3
#include "mma_tile.cuh"
