"""Quantization of a checkpoint, with an evaluation of the original and of the quantized one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.quantize.quality import (
    EvaluationSet,
    QualityScores,
    demo_evaluation_set,
    evaluate_quality,
    text_evaluation_set,
)
from moiety_engine.quantize.writing import write_quantized
from moiety_engine.startup import load_loop
from moiety_kernels.quantization import FORMATS

TOKENIZER = "tokenizer.json"

Note = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """Result of a quantization. `before` and `after` are None if no evaluation data exists for the model."""

    source: str
    target: str
    format: str
    bytes_before: int
    bytes_after: int
    before: QualityScores | None
    after: QualityScores | None


def quantize_and_measure(
    config: EngineConfig, target: Path, to: str, text: str | None, per_domain: int, context: int, note: Note
) -> QuantizationReport:
    """Write the quantized checkpoint of `config` to `target`, and evaluate both.

    `note` is called with (stage, amount done, amount in all). Raises EngineError.
    """
    if to not in FORMATS:
        raise InvalidConfig(f"format {to!r} is not supported; choose one of {', '.join(FORMATS)}")
    source = Path(config.model)
    evaluation_data = _evaluation_data(source, text, per_domain, context)
    sizes = write_quantized(source, target, FORMATS[to], partial(note, "writing"))
    scores: list[QualityScores | None] = [None, None]
    if evaluation_data is not None:
        plain = msgspec.structs.replace(config, quantization="none")
        whole_numbers = not FORMATS[to].floating  # named explicitly they include the head, which counts too
        narrow = msgspec.structs.replace(config, model=str(target), quantization=to if whole_numbers else "auto")
        scores = [
            evaluate_quality(load_loop(one), evaluation_data, partial(note, stage))
            for one, stage in ((plain, "before"), (narrow, "after"))
        ]
    return QuantizationReport(str(source), str(target), to, *sizes, *scores)


def _evaluation_data(source: Path, text: str | None, per_domain: int, context: int) -> EvaluationSet | None:
    if text is not None:
        return text_evaluation_set(source, text, context)
    own, demo = source / TOKENIZER, resolve_checkpoint("") / TOKENIZER
    is_demo = own.is_file() and own.read_bytes() == demo.read_bytes()
    return demo_evaluation_set(source, per_domain) if is_demo else None
