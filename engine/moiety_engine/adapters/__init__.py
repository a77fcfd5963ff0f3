"""LoRA adapters of one replica: read during steps, loaded into slots between steps, evicted when others need memory."""
