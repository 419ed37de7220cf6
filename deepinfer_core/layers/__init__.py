"""Layers of the decoder: linear, attention, norm, rotary, embedding."""
