"""Scheduling policies for deepinfer."""
