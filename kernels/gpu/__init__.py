"""Triton kernels, one file for each family; imported where a GPU, or a test of them, is at hand."""
