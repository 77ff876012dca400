"""Sparse layers of experts on a GPU."""
