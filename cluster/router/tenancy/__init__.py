"""Who calls and what they may do: API keys, the file that they are in, and the audit log."""
