"""OpenAI's Responses API on the shared inference pipeline: fields, events and stored conversations."""
