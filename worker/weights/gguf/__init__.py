"""Checkpoints in llama.cpp's GGUF files: read from strangers, and given as Hugging Face's."""
