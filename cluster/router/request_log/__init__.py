"""The request log: a line of JSON for each call."""
