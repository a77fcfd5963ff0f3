"""What the chart's autoscalers would do to a pool under a trace: their rendered objects, computed as Kubernetes, KEDA
and Prometheus compute them, on devices that are simulated."""
