"""Calls that no client makes: `python -m tests.fuzz` sends thousands of them to a server."""
