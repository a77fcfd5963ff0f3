"""LoRA adapters of tenants: kept in the store, named by clients as models, sent to engines when they are wanted."""
