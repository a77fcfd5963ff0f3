"""Agent runs: requests with one run id, which share a budget, a deadline, a stop switch and the retention of KV."""
