"""Fixtures of kernels: the ways in which this CPU can multiply, sequences in a paged cache, and mutants of kernels."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moiety_kernels.cpu import paths
from moiety_kernels.cpu.team import team
from moiety_kernels.kv_store import kv_store
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.paged_attention.inputs import AttentionMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# the paths that a machine has
ARITHMETICS = {
    "tiles": (paths.TILES, paths.FLOATS),
    "packed": (paths.PAIRS, paths.WORDS, paths.FLOATS),
    "arm_pairs": (paths.ARM_PAIRS, paths.WORDS, paths.FLOATS),
    "words": (paths.WORDS, paths.FLOATS),
    "vectors": (paths.FLOATS,),
}


@pytest.fixture(autouse=True)
def fast_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in pairs wherever the processor can, also where the choice would be another way that is faster."""
    monkeypatch.setattr(paths, "SLOW_PAIRS", False)


@pytest.fixture(scope="module")
def several_threads() -> Iterator[None]:
    """Compute with two threads; other tests use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    team.cache_clear()
    yield
    torch.set_num_threads(before)
    team.cache_clear()


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On matrix tiles; by packed rows as where there are no tiles, or only in eight bits as where bfloat16 is not
    multiplied in pairs; and by floats as where there is nothing of these."""
    way = str(request.param)
    if not all(map(paths.is_usable, ARITHMETICS[way])):
        pytest.skip("this processor does not multiply so: test_emulated.py runs this with its instructions emulated")
    monkeypatch.setattr(paths, "is_usable", lambda path: path in ARITHMETICS[way])
    return way


Paged = Callable[[list[int], list[int], int, int, int, int], tuple[Tensor, LayerCache, AttentionMetadata]]


def _paged(
    queries: list[int], contexts: list[int], heads: int, kv_heads: int, width: int, places: int
) -> tuple[Tensor, LayerCache, AttentionMetadata]:
    """Random queries and a cache whose slots beyond each context, and blocks of nobody, are NaN."""
    widths = [-(-context // places) for context in contexts]
    blocks = torch.randperm(sum(widths) + 3, device=DEVICE)
    k, v = (torch.full((len(blocks), kv_heads, places, width), float("nan"), device=DEVICE) for _ in range(2))
    cache = LayerCache(k, v)
    table = torch.zeros(len(contexts), max(widths), dtype=torch.int32, device=DEVICE)
    first = 0
    for s, (context, count) in enumerate(zip(contexts, widths, strict=True)):
        table[s, :count] = blocks[first : first + count]
        first += count
        at = torch.arange(context, device=DEVICE)
        slots = table[s, at // places].long() * places + at % places
        keys, values = (torch.randn(context, kv_heads, width, device=DEVICE) for _ in range(2))
        kv_store(keys, values, cache, slots)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    metadata = AttentionMetadata(starts, lengths, table, max(queries), max(contexts))
    return torch.randn(sum(queries), heads, width, device=DEVICE), cache, metadata


@pytest.fixture
def paged() -> Paged:
    """Return a function of (queries of each sequence, their contexts, heads, key-value heads, width, places a block).

    It gives the queries, the cache and the metadata that `paged_attention` takes. No sequence is a decode.
    """
    return _paged


@pytest.fixture
def mutated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, str], ModuleType]:
    """`mutated(module, old, new)`: the module with the one place of its text that reads `old` changed to `new`."""

    def mutate(module: ModuleType, old: str, new: str) -> ModuleType:
        text = inspect.getsource(module)
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {module.__name__}"
        path = tmp_path / f"mutant_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        mutant = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, mutant)  # where the annotations of its structs are looked up
        spec.loader.exec_module(mutant)
        return mutant

    return mutate
