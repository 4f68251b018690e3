"""Tasks from what people already have: PEFT folders, AdapterHub folders, fully fine-tuned checkpoints."""
