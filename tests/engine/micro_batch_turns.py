"""Check of the order in which ranks with attention and ranks with experts exchange micro-batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moiety_engine.distribution.layout import Layout
from moiety_engine.errors import EngineError
from moiety_engine.model import remote_experts as apart


class Turns:
    """Check that, in a step of several micro-batches, a rank with experts returns no micro-batch before all ranks with
    attention have sent the next one. They must not wait for the one before. Raises if one does."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._files = [folder / str(rank) for rank in range(layout.attention_ranks)]
        self._given = self._left = self.num_waited = 0

    @contextlib.contextmanager
    def kept(self, rank: int) -> Iterator[None]:
        begin, answer, give = apart.RemoteExperts.begin, apart.ExpertServer.answer, apart._Answering.return_rows

        def noting(mixture: apart.RemoteExperts, *given: Any) -> Any:
            begun = begin(mixture, *given)
            with self._files[rank].open("ab") as file:
                file.write(b".")
            return begun

        def answering(experts: apart.ExpertServer, num_micro_batches: int, **more: bool) -> None:
            self._left = len(experts._layers) * num_micro_batches if num_micro_batches > 1 else 0
            answer(experts, num_micro_batches, **more)

        def giving(layer: apart._Answering, *given: Any, **more: bool) -> Any:
            self._given, self._left = self._given + 1, self._left - 1
            if self._left > 0:
                self._wait_for_the_next()
            return give(layer, *given, **more)

        with (
            patch.object(apart.RemoteExperts, "begin", noting),
            patch.object(apart.ExpertServer, "answer", answering),
            patch.object(apart._Answering, "return_rows", giving),
        ):
            yield

    def _wait_for_the_next(self) -> None:
        end_s = time.monotonic() + 120
        while any(not file.exists() or file.stat().st_size <= self._given for file in self._files):
            if time.monotonic() > end_s:
                raise EngineError("a rank with attention waits for one micro-batch before it sends another")
            time.sleep(0.001)
        self.num_waited += 1
