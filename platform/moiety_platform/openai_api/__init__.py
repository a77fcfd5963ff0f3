"""OpenAI's chat completions and completions: request fields, answers and streamed chunks."""
