"""Shared parts of `gpu_engine.py`: a report that is written to disk at once, and loops over one model."""

from __future__ import annotations

import json
import random
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moiety_engine.bench.engine import make_request
from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.arithmetic import Arithmetic
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.transformer_options import TransformerOptions
from moiety_engine.runner.device_state import free_cached_memory
from moiety_engine.startup import load_loop
from moiety_wire.engine_choices import LoadFormat


@dataclass
class Report:
    """Results, written to disk as soon as they are known."""

    path: Path | None
    begun_s: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=lambda: {"checks": {}, "figures": {}, "errors": {}})

    def check(self, name: str, passed: bool, **more: Any) -> None:
        self.found["checks"][name] = {"passed": bool(passed), **more}
        print(f"{'ok  ' if passed else 'FAIL'} {name} {more or ''}", flush=True)
        self.save()

    def figure(self, name: str, value: Any) -> None:
        self.found["figures"][name] = value
        print(f"     {name}: {value}", flush=True)
        self.save()

    def save(self) -> None:
        self.found["took_s"] = self.elapsed_s
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part; its failure does not affect the others."""
        begin_s = time.monotonic()
        try:
            yield
        except Exception as exc:
            traceback.print_exc()
            self.found["errors"][name] = f"{type(exc).__name__}: {exc}"
            self.check(name, False, error=str(exc)[:300])
        self.figure(f"{name}_took_s", round(time.monotonic() - begin_s, 2))

    @property
    def passed(self) -> bool:
        return all(one["passed"] for one in self.found["checks"].values())


class Bench:
    """One model shape, whose weights are drawn once, and loops over them with each part's settings."""

    def __init__(self, shape: dict[str, Any], device: str, folder: Path, quantization: str = "auto") -> None:
        (folder / "config.json").write_text(json.dumps(shape))
        self.shape = shape
        self.config = EngineConfig(
            model=str(folder), name="random", device=device, dtype="bfloat16", load_format=LoadFormat.DUMMY,
            quantization=quantization,
        )  # fmt: skip
        self._folder = folder
        self.model: Transformer | None = None

    def loop(self, *, invariant: bool = False, **settings: Any) -> EngineLoop:
        """Return a loop; `invariant`: with the same weights, batch-invariant."""
        if self.model is not None:
            free_cached_memory(self.model.device)  # what the loop before this one had is needed again
        config = EngineConfig(**{name: getattr(self.config, name) for name in self.config.__struct_fields__} | settings)
        if self.model is None:
            self.model = load_loop(config).executor.model
        model = self.model
        if invariant:
            model = Transformer(model.spec, model._weights, TransformerOptions(arithmetic=Arithmetic(invariant=True)))
        loop = build_loop(model, config)
        loop.warm_up()
        return loop


def requests(loop: EngineLoop, lengths: list[BenchLengths]) -> list[CoreSubmit]:
    draw = random.Random(0)
    return [make_request(loop, key, one, draw) for key, one in enumerate(lengths)]
