"""What stands around all routes: plain ASGI, each for one thing that calls have in common."""
