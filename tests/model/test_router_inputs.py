"""Inputs of routers that continue the router of the layer before, between pipeline stages and in micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moiety_engine.model.router_mlp import RouterInputs
from moiety_engine.model.router_mlp_spec import RouterMlpSpec
from moiety_engine.model.spec import MoeSpec
from moiety_kernels.route.spec import RoutingSpec

WIDTH = 3


class MiddleStage:
    """A pipeline stage that receives `received_TW`, and notes what it sends to the next stage."""

    size, is_first = 3, False

    def __init__(self, received_TW: Tensor) -> None:
        self.received_TW, self.sent = received_TW, list[Tensor]()

    def receive(self, empty_TW: Tensor) -> Tensor:
        return empty_TW.copy_(self.received_TW)

    def send_to_next_stage(self, x_TW: Tensor) -> None:
        self.sent.append(x_TW)


@pytest.fixture
def stage() -> MiddleStage:
    return MiddleStage(torch.arange(5.0 * WIDTH).view(5, WIDTH))


@pytest.fixture
def inputs(stage: MiddleStage) -> RouterInputs:
    router = RouterMlpSpec(WIDTH, 1e-6, continues=True)
    spec = SimpleNamespace(
        layers=[SimpleNamespace(ffn=MoeSpec(8, RoutingSpec(4, 1, renormalize=False), router_mlp=router))]
    )
    return RouterInputs(cast(Any, spec), cast(Any, stage))


@pytest.mark.parametrize("sizes", [(2, 3), (0, 5), (1, 3, 1)])
def test_micro_batches_continue_their_part_of_what_the_stage_before_sent(
    inputs: RouterInputs, stage: MiddleStage, sizes: tuple[int, ...]
) -> None:
    token_ids_T = torch.arange(5)
    parts = [part_T.clone() for part_T in torch.split(token_ids_T, sizes)]
    inputs.receive(token_ids_T)
    inputs.begin_pass(token_ids_T, parts)
    for part_T, expected_TW in zip(parts, torch.split(stage.received_TW, sizes), strict=True):
        assert inputs.of(part_T).equal(expected_TW)
        if len(part_T):  # an empty part reaches no router
            inputs.keep(part_T, expected_TW + 100)
    inputs.end_pass(token_ids_T, parts)
    inputs.send(token_ids_T)
    assert stage.sent[0].equal(stage.received_TW + 100)


@pytest.mark.parametrize("sizes", [(), (2, 3)])
def test_a_pass_that_is_run_again_continues_what_was_received(
    inputs: RouterInputs, stage: MiddleStage, sizes: tuple[int, ...]
) -> None:
    token_ids_T = torch.arange(5)
    parts = [part_T.clone() for part_T in torch.split(token_ids_T, sizes)] if sizes else []
    inputs.receive(token_ids_T)
    for _ in range(2):
        inputs.begin_pass(token_ids_T, parts)
        found = [inputs.of(part_T) for part_T in parts or [token_ids_T]]
        assert torch.cat(found).equal(stage.received_TW)
        for part_T, input_TW in zip(parts or [token_ids_T], found, strict=True):
            inputs.keep(part_T, input_TW + 1)
        inputs.end_pass(token_ids_T, parts)
    assert inputs.of(token_ids_T).equal(stage.received_TW + 1)
