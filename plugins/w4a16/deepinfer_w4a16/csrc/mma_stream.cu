// W4 tensor-core kernel for few rows: everything but the number of bits is shared.
#define BITS 4
#include "mma_stream.cuh"
