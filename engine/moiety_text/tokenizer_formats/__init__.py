"""Tokenizers in other formats than tokenizer.json, as the contents of a tokenizer.json. Reads no files."""
