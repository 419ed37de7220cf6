// W4 records to FP16 or BF16 rows.
#define BITS 4
#include "mma_dequantize.cuh"
