"""The gateway: HTTP, tenants, keys, admission, routing, usage, traces, SQL, and the `moiety` command.

Knows nothing of torch or of the engine's insides; it meets engines only through `moiety_wire`.
"""
