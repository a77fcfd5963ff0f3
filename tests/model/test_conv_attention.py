"""Compressed convolutional attention and continued routers (ZAYA1): what is undone, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_engine.config import Speculate
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import read_spec, spec_from_config
from moiety_engine.model.tensor_shards import own_spec
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

from .test_parity import tokens
from .test_recurrent_engines import Engine

FEW_WORDS = dict.fromkeys((17, 230, 41), 30.0)  # so that answers repeat themselves in part


def test_rejected_drafts_leave_no_trace_in_states(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint("zaya")
    engines = [Engine(checkpoint, speculate=speculate) for speculate in (Speculate.OFF, Speculate.NGRAM)]
    for engine in engines:
        for key in range(4):
            prompt = tokens(checkpoint.vocab_size, 20 + key, seed=key) + [17, 230, 41] * 4
            engine.prompts[key], engine.answers[key], engine.logprobs[key] = prompt, [], []
            sampling = Sampling(temperature=1.0, seed=key, logit_bias=FEW_WORDS, num_logprobs=1)
            engine.loop.submit(CoreSubmit(key, "t", STANDARD, prompt, sampling, 40, 0, [], 40, b"s", 0))
        engine.run()
    load = engines[1].loop.load()
    assert 0 < load.accepted_tokens_total < load.drafted_tokens_total
    assert engines[0].answers == engines[1].answers


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({"tp": 3}, r"--tp 3 and the model's 2 key-value heads do not match: one must divide the other"),
        ({"tp": 8}, r"4 query heads cannot be divided by --tp 8"),
        ({"dp": 2, "ffn_ranks": 2}, r"--ffn-ranks is not available for zaya"),
    ],
)
def test_layouts_that_divide_what_belongs_together_are_refused(
    make_checkpoint: Any, layout: dict[str, int], match: str
) -> None:
    spec = read_spec(make_checkpoint("zaya").folder)
    with pytest.raises(InvalidConfig, match=match):
        own_spec(spec, RankPosition(Layout(**layout), 0))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"layer_types": ["full_attention"] * 2},
            "layer type 'full_attention' is not supported in zaya; known: hybrid",
        ),
        (
            {"layer_types": ["hybrid", "hybrid_sliding"]},
            "layer_types has hybrid_sliding, but sliding_window is not set",
        ),
        ({"num_query_groups": 2}, r"config.json has num_query_groups, as the first releases of ZAYA1 do"),
        ({"cca_time0": 3}, "cca_time0 3 is not supported in zaya; known: 2"),
        ({"attention_bias": True}, "attention_bias True is not supported in zaya"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported in zaya"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        spec_from_config({"model_type": "zaya", "num_hidden_layers": 2} | changes)


def test_rotary_parameters_are_read_as_published() -> None:
    """The released config.json has a rope_type beside those of the kinds of layers."""
    by_kind = {
        "hybrid": {"rope_type": "default", "rope_theta": 5_000_000, "partial_rotary_factor": 0.5},
        "hybrid_sliding": {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": 0.5},
    }
    plain = spec_from_config({"model_type": "zaya"})
    assert spec_from_config({"model_type": "zaya", "rope_parameters": by_kind | {"rope_type": "default"}}) == plain
    assert [rope.rotary_width for rope in plain.ropes] == [64]
