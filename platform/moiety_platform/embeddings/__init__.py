"""OpenAI's `/v1/embeddings` on the shared inference pipeline."""
