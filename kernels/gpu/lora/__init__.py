"""LoRA and DoRA on the rows of a batch on a GPU."""
