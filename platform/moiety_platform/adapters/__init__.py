"""LoRA adapters of tenants: kept in the object store, named by clients as models, sent to engines on first use."""
