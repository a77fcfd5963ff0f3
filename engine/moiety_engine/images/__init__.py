"""Images of prompts in the engine core: their places among the tokens, and the cache of what the encoder returns."""
