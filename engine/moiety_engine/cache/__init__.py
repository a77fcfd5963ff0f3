"""The paged KV cache's book-keeping: blocks, reference counts, prefix hashes. Pure Python; it sees no tensor."""
