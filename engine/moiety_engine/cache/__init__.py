"""Bookkeeping of the paged KV cache: blocks, reference counts, prefix hashes. Pure Python, without tensors."""
