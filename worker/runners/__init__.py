"""Model runners: what takes a step through the model by torch, the C library or CUDA graphs."""
