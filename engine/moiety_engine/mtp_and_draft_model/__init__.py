"""Speculative decoding with a draft model: a second, small model, or the served model's MTP layer."""
