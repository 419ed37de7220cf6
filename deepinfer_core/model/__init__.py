"""The generic decoder, the model spec it is driven by, and the shapes that follow from it."""
