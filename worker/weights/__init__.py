"""The weight loader: checkpoints, and the slices of them that one rank holds."""
