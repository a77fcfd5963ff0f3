"""The playground: conversations with one or two models under a tenant's key."""
