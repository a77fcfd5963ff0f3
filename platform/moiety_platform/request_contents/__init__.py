"""Contents of logged requests: prompts and answers of tenants that opted in, redacted and encrypted."""
