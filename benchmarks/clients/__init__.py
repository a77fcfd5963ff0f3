"""Matrix of real clients and tasks against a gateway. Knows the clients' packages, but not the gateway's code."""
