"""Errors of the commands that the chart's pods run before they serve.

ClusterError                 the message says what to do next
├── NotInACluster            the address of the API or the pod's identity is unknown
├── HalfAPair                a Secret holds a public key without its secret key
├── UnusableEntry            a Secret holds an entry from which its counterpart cannot be derived
├── ApiRefused               the API refused the request
└── TokenizerNotAvailable    the hub has no usable tokenizer, or is not reachable
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


class TokenizerNotAvailable(ClusterError):
    pass
