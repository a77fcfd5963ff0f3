"""KV transfer between engines: wire format, transports, sender and receiver."""
