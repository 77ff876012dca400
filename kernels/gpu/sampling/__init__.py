"""Sampling and log-probabilities on a GPU."""
