"""Checkpoints whose linears are quantized: how they lie in files, and what is meant by them."""
