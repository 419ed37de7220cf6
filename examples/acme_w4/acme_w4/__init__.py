"""Acme's W4 kernel for deepinfer."""
