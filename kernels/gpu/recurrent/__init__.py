"""Layers whose past is a state, on a GPU."""
