"""Prompts that are likely to come, computed while there is nothing else to do."""
