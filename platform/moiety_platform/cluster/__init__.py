"""Prerequisites of a Kubernetes installation: Secrets, created once and never changed."""
