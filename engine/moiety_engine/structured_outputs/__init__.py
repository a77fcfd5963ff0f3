"""Answers that keep to a guide: guides compiled beside the steps, and which tokens each of them lets through next."""
