"""From a plan to tensors, and how much memory there is for KV."""
