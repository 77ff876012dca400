"""A router as a replica of Serve: its middleware, its TLS, and what it is at."""
