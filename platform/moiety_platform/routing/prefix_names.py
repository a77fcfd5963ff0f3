"""Names of a prompt's blocks, as engines publish those of their prefix caches, hashed in slices."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from moiety_wire.block_hashes import HASH_BYTES, MARK_BYTES, root_hash
from moiety_wire.messages import Submit
from moiety_wire.prefix_events import NAME_BYTES, UNUSED_BITS, unpack_names

SLICE_TOKENS = 4096  # hashed at once, in about 0.3 ms


class PrefixNames:
    """Names of the leading full blocks of one prompt, as far as they are hashed.

    The last token is computed even if its block is cached, so a block that ends with it has no name.
    """

    __slots__ = ("_num_blocks", "_parent", "_submit", "block_size", "names")

    def __init__(self, submit: Submit, block_size: int) -> None:
        self.block_size = block_size  # in tokens
        self.names: list[int] = []
        self._submit = submit
        self._num_blocks = (len(submit.prompt_ids) - 1) // block_size
        self._parent = root_hash(submit.tenant_id, submit.cache_salt)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._submit.prompt_ids)

    @property
    def is_complete(self) -> bool:
        return len(self.names) >= self._num_blocks

    def hash_slice(self) -> None:
        """Name the blocks of the next SLICE_TOKENS tokens, the same as `block_hashes.block_hash` in one loop."""
        size = self.block_size
        begin = len(self.names)
        end = min(self._num_blocks, begin + max(1, SLICE_TOKENS // size))
        tokens = array("q", self._submit.prompt_ids[begin * size : end * size]).tobytes()
        num_bytes = size * array("q").itemsize
        parent, mark, heads = self._parent, self._parent[:MARK_BYTES], []
        for start in range(0, len(tokens), num_bytes):
            block = blake2b(parent + tokens[start : start + num_bytes], digest_size=HASH_BYTES).digest()
            heads.append(block[:NAME_BYTES])
            parent = mark + block
        self._parent = parent
        self.names += [name >> UNUSED_BITS for name in unpack_names(b"".join(heads))]
