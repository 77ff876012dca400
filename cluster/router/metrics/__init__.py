"""What routers count, what they gather from schedulers, and its Prometheus text."""
