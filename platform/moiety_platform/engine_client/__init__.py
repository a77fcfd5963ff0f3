"""How the gateway speaks to engines: one interface, the ZeroMQ client behind it, and a scripted one that ships.

Knows messages, credit and the death of an engine; knows no HTTP, no tenants and no text.
"""
