"""One scheduler replica: step loop, executor of its ranks, LoRA loads, connections of routers."""
