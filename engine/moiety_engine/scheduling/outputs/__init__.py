"""Results of steps: output of requests, ends of requests, and predictions of output lengths."""
