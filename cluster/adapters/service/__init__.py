"""The adapter pool as an actor: reads adapters, keeps them and hands out their shards."""
