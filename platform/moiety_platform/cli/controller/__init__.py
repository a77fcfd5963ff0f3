"""Command `moiety controller`: custom resources of Kubernetes, applied as a file of `moiety apply` is."""
