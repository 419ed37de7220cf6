"""Honest benchmarks: each result says which path ran, on what, and how often it was repeated."""
