"""LoRA adapters of one replica: read from folders, loaded into slots beside the steps, given up when others need room."""
