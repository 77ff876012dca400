"""Who gets what: shares of tenants, LoRA slots, and unloads that wait for those who run."""
