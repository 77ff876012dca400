"""A real model and real adapters, small enough for a laptop and for every test machine."""
