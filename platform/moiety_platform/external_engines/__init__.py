"""Servers of others as engines: whatever speaks OpenAI's completions over HTTP, behind the same EngineClient.

Prompts go to them as token ids, since the gateway has counted them; what they stream becomes the wire's messages. Such
a server knows no credit: a request has all of it from the start, and what the server counts is what is settled.
"""
