"""The adapters that a rank holds, one in each slot."""
