"""The paged KV cache of a rank, on its device and in host memory."""
