"""From logits to tokens: the sampler, log-probabilities, pending sampled tokens."""
