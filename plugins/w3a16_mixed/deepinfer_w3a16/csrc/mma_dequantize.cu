// W3 records to FP16 or BF16 rows.
#define BITS 3
#include "mma_dequantize.cuh"
