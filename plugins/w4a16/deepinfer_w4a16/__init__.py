"""4-bit weights with 16-bit activations for deepinfer."""
