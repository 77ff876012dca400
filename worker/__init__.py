"""One tensor-parallel rank: model, weights, KV pages, adapter bank and sampler."""
