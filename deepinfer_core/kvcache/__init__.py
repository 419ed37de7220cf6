"""The paged KV cache: page pool, prefix cache, sequences and the batches that attention reads."""
