"""Each rank encodes whole images, but computes its part of a token only: an image costs more tokens on more ranks."""

from __future__ import annotations

import pytest
from tests.vision_checkpoint import write_checkpoint

from moiety_engine.distribution.layout import Layout
from moiety_engine.model.families import read_spec
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.vision_cost import encoder_cost


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("vision")
    write_checkpoint(folder)
    return read_spec(folder)


def test_an_image_costs_more_tokens_where_ranks_divide_each_token(spec: ModelSpec) -> None:
    alone, divided = encoder_cost(spec, Layout()), encoder_cost(spec, Layout(tp=2))
    assert 1.7 < divided.linear / alone.linear <= 2.0  # the router is not divided
    assert divided.quadratic / alone.quadratic == pytest.approx(divided.linear / alone.linear)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2), Layout(dp=2, ep=2), Layout(ffn_ranks=1)])
def test_ranks_that_compute_whole_tokens_change_no_cost(spec: ModelSpec, layout: Layout) -> None:
    assert encoder_cost(spec, layout).linear == pytest.approx(encoder_cost(spec, Layout()).linear)


def test_more_expert_ranks_make_tokens_cheaper(spec: ModelSpec) -> None:
    assert encoder_cost(spec, Layout(ffn_ranks=2)).linear > encoder_cost(spec, Layout(ffn_ranks=1)).linear
