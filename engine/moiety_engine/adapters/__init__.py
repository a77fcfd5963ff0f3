"""LoRA adapters of one replica: read beside the steps, put into slots between them, given up when others need room."""
