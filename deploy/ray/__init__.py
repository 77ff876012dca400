"""Clusters that Ray's own launcher brings up: their files, and what it leaves undone."""
