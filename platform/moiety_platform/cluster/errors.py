"""What goes wrong between a pod and Kubernetes' API.

ClusterError         the message says what to do next
├── NotInACluster    nothing says where the API is, or who asks
├── HalfAPair        a Secret holds a public key without its secret one
├── UnusableEntry    a Secret holds an entry from which what belongs to it cannot be made
└── ApiRefused       the API answered, and not as it was asked to
"""

from __future__ import annotations


class ClusterError(Exception):
    pass


class NotInACluster(ClusterError):
    pass


class ApiRefused(ClusterError):
    pass


class HalfAPair(ClusterError):
    pass


class UnusableEntry(ClusterError):
    pass
