"""Simulation of the chart's autoscalers on a trace.

The objects that the chart renders are evaluated as Kubernetes, KEDA and Prometheus evaluate them, on simulated devices.
"""
