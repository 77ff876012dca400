"""Pure functions of tensors: attention over pages, LoRA and the small ops around them."""
