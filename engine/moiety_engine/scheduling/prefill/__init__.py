"""Planning of prefill: which prompts a step computes, and how much of each."""
