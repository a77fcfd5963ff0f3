"""A service of grammar processes for tests, and helpers that find, kill and wait for its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_demo import checkpoint_path
from moiety_engine.config import GrammarLimits
from moiety_engine.messages import CoreSubmit
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.service import GrammarService
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.classes import STANDARD
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import Sampling

TEXT = read_text_model(checkpoint_path())
TOKENIZER = Tokenizer.from_json(TEXT.tokenizer_json)
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)
MASK_BYTES = 4 * COMPILER.num_words
INT64_MIN = -(2**63)
CRASHING = [
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MIN})),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "minimum": -(10**19), "maximum": -(10**19)})),
    GrammarSpec(
        GrammarKind.GRAMMAR, f'start: %json {{"type": "integer", "minimum": {INT64_MIN}, "maximum": {INT64_MIN}}}'
    ),
]
SLOW = [GrammarSpec(GrammarKind.REGEX, letter * 30_000) for letter in ("x?", "y?")]
CHOICE = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]')
LIST = GrammarSpec(
    GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 40}'
)
LIMITS = GrammarLimits(compile_cpu_s=0.3, compile_wall_s=60.0)  # other processes slow it down


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService(checkpoint_path(), LIMITS)
    yield made
    made.close()


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait until the condition holds, and return its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it did not come true in time"
    return found


def asked(key: int, grammar: GrammarSpec | None, tenant_id: str = "t", **more: Any) -> CoreSubmit:
    prompt, eos = TOKENIZER.encode("What is it?"), list(TEXT.eos_token_ids)
    submit = CoreSubmit(key, tenant_id, STANDARD, prompt, Sampling(seed=key), 60, 0, eos, 60, b"", 0, grammar=grammar)
    return msgspec.structs.replace(submit, **more)


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """End processes, and wait until they have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a trial that has ended by itself
            os.kill(pid, number)
        until(partial(is_dead, pid))


def template_pid(service: GrammarService) -> int:
    return service._template.pid


def opened(service: GrammarService, grammar: GrammarSpec) -> GrammarHandle:
    service.compile(grammar)
    handle = service.open(grammar)
    assert handle is not None
    return handle


def mask_of(handle: GrammarHandle) -> bytes:
    (mask,) = masks_of([handle])
    assert mask is not None, handle.problem
    return mask


def masks_of(handles: list[GrammarHandle]) -> list[bytes | None]:
    """Return the masks of handles of one process in one round trip; None for a handle with an error."""
    masks, places = handles[0].worker.step(handles)
    return [None if one < 0 else bytes(masks[one * MASK_BYTES : (one + 1) * MASK_BYTES]) for one in places]
