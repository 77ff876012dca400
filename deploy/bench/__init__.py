"""Closed-loop load on a server, on the engine alone or on a peer, with the same prompts."""
