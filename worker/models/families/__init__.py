"""The model families that can be served, one file each; free of torch."""
