"""KV pages on device and host: page pool, radix trees, prefix cache, eviction and offload."""
