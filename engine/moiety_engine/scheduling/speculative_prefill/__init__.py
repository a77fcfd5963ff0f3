"""Speculative prefill: computes prompts that are likely to arrive while there is nothing else to do."""
