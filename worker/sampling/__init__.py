"""From logits to tokens: sampling, log-probabilities, tokens that are still being drawn."""
