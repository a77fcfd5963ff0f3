"""Runs what the chart renders, without a cluster: pods as processes of this machine, in namespaces of their own.

For Linux and its root user. It knows as much of Kubernetes as the chart uses: Jobs as hooks, Deployments, StatefulSets,
Services, ConfigMaps, Secrets, volumes, probes, policies. It builds no image: `images` says what stands in for one.
"""
