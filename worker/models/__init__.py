"""The forward pass of a model on one rank, and its configuration."""
