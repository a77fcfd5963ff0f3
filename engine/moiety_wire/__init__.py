"""What gateway and engine say to each other: the messages, one codec, nothing else.

A torch-free leaf. It knows no sockets, no HTTP and no scheduling; both sides import it, it imports neither.
"""
