"""Fakes: a rank without a model, for tests of what drives ranks."""
