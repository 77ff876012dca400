"""Bodies, responses and stream chunks of the HTTP API."""
