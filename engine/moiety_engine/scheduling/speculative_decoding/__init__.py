"""Speculative decoding: drafts of the next tokens, and the decision whether verifying them pays.

A draft changes how many tokens a step yields, never which ones.
"""
