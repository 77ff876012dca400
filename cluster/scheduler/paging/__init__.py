"""The pages of running sequences: those of the KV cache, of windows and of states."""
