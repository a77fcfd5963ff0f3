"""Embeddings over HTTP: OpenAI's `/v1/embeddings`, carried out by the pipeline of completions."""
