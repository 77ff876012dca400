"""The running cluster: actors, Serve applications and their supervision."""
