"""Checkpoints, and the slices of them that one rank holds."""
