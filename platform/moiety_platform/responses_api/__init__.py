"""OpenAI's Responses API over the same pipeline: its fields, its events, and the conversations that it keeps."""
