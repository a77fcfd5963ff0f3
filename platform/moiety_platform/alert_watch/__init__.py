"""Watch over engines, the disk and SLOs: all gateways see conditions, and one of them reports each change."""
