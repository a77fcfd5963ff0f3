"""What a Kubernetes installation needs before its first pod: Secrets, made once and never changed."""
