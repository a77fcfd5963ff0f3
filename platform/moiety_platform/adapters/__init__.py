"""LoRA adapters of tenants: kept in the database, named by clients as models, sent to engines on first use."""
