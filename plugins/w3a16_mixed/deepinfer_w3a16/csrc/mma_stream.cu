// W3 tensor-core kernel for few rows: everything but the number of bits is shared.
#define BITS 3
#include "mma_stream.cuh"
