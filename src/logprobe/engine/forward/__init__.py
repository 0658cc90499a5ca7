"""One step's tokens through the model: its attention, its pool of keys and values, its LoRA weights."""
