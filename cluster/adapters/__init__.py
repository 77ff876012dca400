"""Adapters from PEFT directory to per-rank shard: checked at the door, named by content."""
