"""Wire protocol between gateway and engine: the messages and one codec.

Imports no torch, and knows no sockets, no HTTP and no scheduling. Both sides import this package; it imports neither.
"""
