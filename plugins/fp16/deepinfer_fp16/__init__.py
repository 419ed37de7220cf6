"""Dense linear layers and attention for deepinfer."""
