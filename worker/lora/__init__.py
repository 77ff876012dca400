"""LoRA adapters on a rank: slots, loading, DoRA, and the shards that the adapter pool sends."""
