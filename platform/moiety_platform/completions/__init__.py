"""Generation over HTTP: OpenAI's chat and completions, from the bytes of a body to the bytes of an answer."""
