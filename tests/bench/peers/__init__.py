"""Topwork beside vLLM's CPU build, llama.cpp's server and transformers + peft, in turns."""
