"""Paged attention of prefills and decodes on a GPU."""
