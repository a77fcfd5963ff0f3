"""Access to the tensors of a GGUF file by memory map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from moiety_engine.gguf.header import read_header
from moiety_engine.gguf.names import GgufTensor, tensors_by_name

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from moiety_engine.gguf.header import TensorEntry

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def gguf_file(folder: Path) -> Path:
    """Return the (first) GGUF file of a folder that `gguf.folder` made."""
    return next(iter(sorted(folder.glob("*.gguf"))))


class GgufTensorFile:
    """Tensors of a model's GGUF files, by the keys of `GgufTensor`. Pages are read when a tensor is used."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._maps = {one: np.memmap(one, dtype=np.uint8, mode="c") for one in header.paths}
        self._entries: dict[str, tuple[TensorEntry, GgufTensor]] = {}
        for tensors in tensors_by_name(header).values():
            for one in tensors:
                if one.name in header.tensors:
                    self._entries[one.key] = header.tensors[one.name], one

    def keys(self) -> list[str]:
        """Return the keys of all tensors."""
        return list(self._entries)

    def get_tensor(self, key: str) -> Tensor:
        """Return a tensor; one of blocks as uint8 with the bytes of a row in its last dimension."""
        entry, of = self._entries[key]
        data = torch.from_numpy(self._maps[entry.path])[entry.offset : entry.offset + entry.num_bytes]
        if entry.type.name in _DTYPES:
            tensor = data.clone() if entry.offset % 4 else data
            tensor = tensor.view(_DTYPES[entry.type.name]).view(entry.shape)
        else:
            tensor = data.view(*entry.shape[:-1], entry.shape[-1] // entry.type.numbers * entry.type.num_bytes)
        return tensor if of.expert is None else tensor[of.expert]
