"""Comparisons with other servers and schedulers; run by make targets, not by tests."""
