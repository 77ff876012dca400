"""Products on a GPU whose every row has the same bits, whatever rows stand beside it."""
