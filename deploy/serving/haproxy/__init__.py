"""HAProxy in front of the routers: how Serve runs it, what is asked of it, and who keeps it."""
