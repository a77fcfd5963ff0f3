"""The Harmony format of gpt-oss: messages in the channels analysis, commentary and final.

Specification: OpenAI's harmony response format. An answer is a row of messages of the assistant, each a header, the
token `<|message|>`, and a body up to `<|end|>`, `<|call|>` (a tool call) or `<|return|>` (the end of the answer).
"""
