"""Requests, planning and the cycle that runs them: plan, prepare, launch, join, finish."""
