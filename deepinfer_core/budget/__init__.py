"""The byte budget: weights, a step, the KV cache; the same numbers before loading and in a running engine."""
