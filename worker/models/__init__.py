"""The forward pass of decoders: layers, embedding and lm_head, rotary tables; and the families."""
