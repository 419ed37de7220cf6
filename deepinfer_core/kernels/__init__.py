"""The room with the arithmetic: group-wise math, torch kernels, and (alone in the house) CuPy."""
