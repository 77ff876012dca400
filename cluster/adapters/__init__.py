"""Adapters from PEFT directory to per-rank shard: checked when read, named by content."""
