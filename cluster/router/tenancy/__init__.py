"""Who calls a router, and how much each caller may have."""
