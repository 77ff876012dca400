"""What each step computes: batching, fairness, preemption, KV cache, LoRA slots; no clock."""
