"""The adapter pool as an actor: reads, stores, reclaims and hands out adapters."""
