"""Engine clients of the gateway: one interface, the ZeroMQ client, and a scripted client.

They handle messages, credit and engine failure, and are independent of HTTP, tenants and text.
"""
