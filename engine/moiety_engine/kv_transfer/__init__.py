"""KV from one engine to another: what it looks like on the way, the ways there, and both ends."""
