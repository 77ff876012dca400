"""A scheduler over a fake rank, for tests and simulations."""
