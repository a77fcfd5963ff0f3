"""Command `moiety batch run`: offline inference on a file of requests, in OpenAI's form and in this process."""
