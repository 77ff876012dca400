"""How far a model as it would be served is from its own checkpoint in full."""
