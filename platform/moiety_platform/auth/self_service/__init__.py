"""Self-service of users: their projects, usage and own keys."""
