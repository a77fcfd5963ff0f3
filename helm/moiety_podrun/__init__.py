"""Runs the rendered chart without a cluster: pods as processes of this machine, in their own namespaces.

It needs Linux and its root user. It implements the part of Kubernetes that the chart uses: Jobs as hooks, Deployments,
StatefulSets, Services, ConfigMaps, Secrets, volumes, probes, policies. It builds no image: `images` defines the
replacement of each.
"""
