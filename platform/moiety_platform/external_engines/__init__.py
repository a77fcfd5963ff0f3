"""External engines: servers with OpenAI's completions over HTTP, behind the common EngineClient.

Prompts are sent as token ids, since the gateway has counted them. The streamed answers become wire messages. External
servers have no credit: a request has all its credit from the start, and the server's count is billed.
"""
