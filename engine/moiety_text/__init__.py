"""Text to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings.

A torch-free leaf. It knows no sockets, no HTTP and no model; gateway and engine both import it.
"""
