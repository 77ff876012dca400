"""The forward pass of the Llama family: decoder layers, embedding and lm_head, rotary tables."""
