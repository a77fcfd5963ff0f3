"""OpenAI's chat completions and completions: the fields of their requests, answers and streamed chunks."""
