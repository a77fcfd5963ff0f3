"""GGUF files, the format of llama.cpp: header, configuration and tokenizer from their metadata. Imports no torch."""
