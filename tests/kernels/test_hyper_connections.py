"""Hyper-connections are DeepSeek-V4's, and on a CPU those of the definition, token by token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.hyper_connections import collapse_streams, cpu, expand_streams, mixture_weights, reference

STREAMS, WIDTH, EPS = 4, 48, 1e-6

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


def mixtures(tokens: int, streams: int = STREAMS) -> tuple[Tensor, Tensor, Tensor]:
    columns = streams * (2 + streams)
    return torch.randn(tokens, columns) * 3, torch.rand(3) + 0.5, torch.randn(columns)


def test_the_definition_is_deepseek_v4s() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

    config = SimpleNamespace(hc_mult=STREAMS, hc_sinkhorn_iters=7, hc_eps=EPS, rms_norm_eps=1e-5, hidden_size=WIDTH)
    theirs, streams, output = DeepseekV4HyperConnection(config), torch.randn(30, STREAMS, WIDTH), torch.randn(30, WIDTH)
    head = DeepseekV4HyperHead(config)
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *head.parameters()):
            parameter.normal_()
        post, comb, collapsed = theirs(streams[None])
        expected = post[0].unsqueeze(2) * output.unsqueeze(1) + comb[0].mT @ streams
        flat = streams.flatten(1)
        flat = flat / (flat.square().mean(1, keepdim=True) + 1e-5).sqrt()
        pre, own_post, own_comb = mixture_weights(flat @ theirs.fn.T, theirs.scale, theirs.base, STREAMS, 7, EPS)
        assert own_post is not None and own_comb is not None
        torch.testing.assert_close(own_comb, comb[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(collapse_streams(streams, pre), collapsed[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(expand_streams(streams, output, own_post, own_comb), expected, rtol=1e-4, atol=1e-5)
        pre, *others = mixture_weights(flat @ head.hc_fn.T, head.hc_scale, head.hc_base, STREAMS, 7, EPS)
        assert others == [None, None]
        torch.testing.assert_close(collapse_streams(streams, pre), head(streams[None])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "streams", "width"), [(1, 4, 64), (37, 3, 48), (9, 1, 16)])
def test_on_a_cpu_they_are_the_references(tokens: int, streams: int, width: int) -> None:
    given = mixtures(tokens, streams)
    pre, post, comb = cpu.mixture_weights(*given, streams, 5, EPS)
    expected = reference.mixture_weights(*given, streams, 5, EPS)
    assert post is not None and comb is not None
    for ours, theirs in zip((pre, post, comb), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    rows, output = torch.randn(tokens, streams, width), torch.randn(tokens, width)
    torch.testing.assert_close(cpu.collapse_streams(rows, pre), reference.collapse_streams(rows, pre))
    expanded = cpu.expand_streams(rows, output, post, comb)
    torch.testing.assert_close(expanded, reference.expand_streams(rows, output, post, comb), rtol=1e-5, atol=1e-5)


def test_a_tokens_bits_do_not_depend_on_the_other_tokens() -> None:
    logits, scale, base = mixtures(50)
    rows, output = torch.randn(50, STREAMS, WIDTH), torch.randn(50, WIDTH)

    def computed(some: slice) -> tuple[Tensor, Tensor]:
        pre, post, comb = mixture_weights(logits[some], scale, base, STREAMS, 20, EPS)
        assert post is not None and comb is not None
        return collapse_streams(rows[some], pre), expand_streams(rows[some], output[some], post, comb)

    together = computed(slice(None))
    for t in range(50):
        for alone, beside in zip(computed(slice(t, t + 1)), together, strict=True):
            assert torch.equal(alone[0], beside[t])


def test_the_mixing_matrix_is_nearly_doubly_stochastic() -> None:
    _, _, comb = mixture_weights(*mixtures(100), STREAMS, 20, EPS)
    assert comb is not None
    torch.testing.assert_close(comb.sum(1), torch.ones(100, STREAMS), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(2), torch.ones(100, STREAMS), rtol=0, atol=0.05)


def test_columns_that_match_no_streams_are_refused() -> None:
    logits, scale, base = mixtures(3)
    with pytest.raises(KernelInputError, match="23 columns do not match"):
        mixture_weights(logits[:, 1:], scale, base[1:], STREAMS, 5, EPS)
