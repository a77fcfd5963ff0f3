"""The MTP layer of DeepSeek-V4 against plain torch: e_proj(enorm(embed(t_{i+1}))) + h_proj(hnorm(x_i)) for each
residual stream x, a decoder layer with attention to a window, and a mixture of the streams and a norm of its own before
the model's head. The decoder layer and the mixture are transformers'."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.families import read_spec, spec_from_config
from moiety_engine.model.loading import load_model

from .recent_variants import RECENT_VARIANTS
from .test_layouts import config_of
from .test_mtp_spec import Driver, Published, check_says_what_plain_torch_says, edit_config, edit_weights

FAMILY, SETTINGS = RECENT_VARIANTS["deepseek_v4"]
NUM_LAYERS = SETTINGS["num_hidden_layers"]
WITH_MTP_LAYER = {
    "one more": (
        FAMILY,
        SETTINGS
        | {"num_hidden_layers": NUM_LAYERS + 1, "layer_types": [*SETTINGS["layer_types"], "sliding_attention"]}
        | {"mlp_layer_types": [*SETTINGS["mlp_layer_types"], "moe"]},
    )
}


@dataclass
class PublishedV4(Published):
    """Hidden states are those of all streams, side by side."""

    @torch.no_grad()
    def made(self, token_ids: list[int]) -> Tensor:
        inner, ids = self.oracle.model, torch.tensor([token_ids])
        x_TND = inner.embed_tokens(ids).unsqueeze(2).expand(-1, -1, inner.config.hc_mult, -1).contiguous()
        for layer in inner.layers[:-1]:
            x_TND = self._through_layer(layer, x_TND, ids)
        return x_TND[0].flatten(1)

    @torch.no_grad()
    def mtp_hidden(self, token_ids: list[int], before_TD: Tensor) -> Tensor:
        inner, extra, ids = self.oracle.model, self.extra, torch.tensor(token_ids)
        before_TND = before_TD.view(len(before_TD), inner.config.hc_mult, -1)
        token_TD = self._normed(inner.embed_tokens(ids), extra["enorm.weight"]) @ extra["e_proj.weight"].T
        own_TND = self._normed(before_TND, extra["hnorm.weight"]) @ extra["h_proj.weight"].T
        return self._through_layer(inner.layers[-1], (token_TD[:, None] + own_TND)[None], ids[None])[0].flatten(1)

    @torch.no_grad()
    def logprobs(self, hidden_TD: Tensor) -> Tensor:
        head, extra = self.oracle.model.hc_head, self.extra
        for name in ("fn", "base", "scale"):
            getattr(head, f"hc_{name}").copy_(extra[f"hc_head_{name}"])
        mixed_TD = head(hidden_TD.view(1, len(hidden_TD), self.oracle.config.hc_mult, -1))[0]
        return self.oracle.lm_head(self._normed(mixed_TD, extra["norm.weight"])).log_softmax(-1)

    def _through_layer(self, layer: Any, x_TND: Tensor, ids: Tensor) -> Tensor:
        inner = self.oracle.model
        places = torch.arange(x_TND.shape[1])[None]
        ages = places[0][:, None] - places[0]
        hidden = (ages < 0) | (ages >= inner.config.sliding_window)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
        rotary = {kind: inner.rotary_emb(x_TND[:, :, 0], places, kind) for kind in ("main", "compress")}
        found: Tensor = layer(
            x_TND, input_ids=ids, position_embeddings=rotary, position_ids=places, attention_mask=mask, cache=None
        )
        return found


def publish_v4(checkpoint: Any) -> PublishedV4:
    """Publish a checkpoint of `WITH_MTP_LAYER`, whose last layer becomes the MTP layer."""
    folder, config = checkpoint.folder, checkpoint.oracle.config
    width, streams = config.hidden_size, config.hc_mult
    extra = {name: torch.rand(width) + 0.5 for name in ("enorm.weight", "hnorm.weight", "norm.weight")}
    extra |= {name: torch.randn(width, width) * 0.1 for name in ("e_proj.weight", "h_proj.weight")}
    extra |= {"hc_head_fn": torch.randn(streams, streams * width) * 0.1, "hc_head_base": torch.randn(streams)}
    extra["hc_head_scale"] = torch.rand(1) + 0.5
    tensors = {
        re.sub(rf"^(model\.)?layers\.{NUM_LAYERS}\.", "mtp.0.", name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors | {f"mtp.0.{name}": one for name, one in extra.items()}, folder / "model.safetensors")
    edit_config(
        folder,
        num_hidden_layers=NUM_LAYERS,
        num_nextn_predict_layers=1,
        layer_types=SETTINGS["layer_types"],
        mlp_layer_types=SETTINGS["mlp_layer_types"],
    )
    return PublishedV4(folder, checkpoint.oracle, extra)


@pytest.fixture
def published(make_checkpoint: Callable[..., Any]) -> PublishedV4:
    return publish_v4(make_checkpoint("one more", variants=WITH_MTP_LAYER))


def test_the_mtp_layer_of_deepseek_v4_says_what_plain_torch_says(published: PublishedV4) -> None:
    check_says_what_plain_torch_says(published)


def test_its_rows_are_in_blocks_and_it_has_no_state(published: PublishedV4) -> None:
    driver = Driver(published.folder, dtype="float32")
    assert driver.mtp.state_bytes == 0
    assert driver.mtp.kv_bytes_per_block(16) == 16 * 32 * 4
    hidden_bytes = 16 * 4 * driver.model.spec.hidden_size * 4
    assert driver.model.kv_bytes_per_block(16) > hidden_bytes


def test_a_checkpoint_without_the_mtp_layer_or_with_entries_in_it_is_refused(published: PublishedV4) -> None:
    folder = published.folder
    config = config_of(folder) | {"layer_types": None, "compress_ratios": [0, 4, 128, 4, 4]}
    with pytest.raises(UnsupportedModelError, match="an MTP layer with compress_ratios 4 is not supported"):
        spec_from_config(config)
    edit_weights(folder, lambda tensors: tensors.pop("mtp.0.e_proj.weight"))
    with pytest.raises(WeightsError, match=r"have no mtp.0.e_proj.weight"):
        load_model(folder, device="cpu", dtype="float32", keeps_hidden=True)
    edit_config(folder, num_nextn_predict_layers=0)
    assert read_spec(folder).mtp is None
