"""The adapter pool: its replica, its process, its state file, and how others call it."""
