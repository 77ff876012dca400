"""Who calls and what they may do and have: API keys, their file, the audit log, limits."""
