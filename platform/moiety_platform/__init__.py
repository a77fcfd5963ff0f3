"""The gateway: HTTP, tenants, keys, admission, routing, usage, traces, SQL, and the `moiety` command.

Independent of torch and of the engine's internals; it communicates with engines only through `moiety_wire`.
"""
