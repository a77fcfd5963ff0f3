"""Conversion between text and tokens: tokenizer, chat template, incremental detokenizer, stop strings.

A torch-free leaf package. It uses no sockets, no HTTP and no model; gateway and engine both import it.
"""
