"""`moiety batch run`: a file of requests answered by an engine in this process, in OpenAI's form."""
