"""What bodies and adapters of strangers cost the streams and the memory of a server."""
