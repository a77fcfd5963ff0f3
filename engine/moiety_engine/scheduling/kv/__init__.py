"""KV blocks of sequences on the device and on the host, by rank group."""
