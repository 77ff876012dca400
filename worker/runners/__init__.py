"""What runs a step through the model: torch, the C library, or a GPU with CUDA graphs."""
