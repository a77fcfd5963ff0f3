"""Guardrails: checks of the text of requests and answers, which block or observe."""
