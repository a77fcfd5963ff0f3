"""The MTP layer of Nemotron 3 against plain torch: eh_proj([enorm(embed(t_{i+1})); hnorm(h_i)]), attention and a
feed-forward, each a layer of its own on disk, and a norm before the model's head. The two layers are transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.families import ignored_keys, read_spec, spec_from_config
from moiety_engine.model.loading import load_model
from moiety_engine.model.spec import MoeSpec

from .recent_variants import RECENT_VARIANTS
from .test_mtp_spec import COUNTED, Driver, Published, check_says_what_plain_torch_says, edit_config, edit_weights
from .test_released_configs import NEMOTRON_3_NANO

LETTERS = {"full_attention": "*", "moe": "E", "mlp": "-"}


def variant_with(*mtp_types: str, **changes: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return a variant whose last layers on disk are to become the MTP layer."""
    family, settings = RECENT_VARIANTS["nemotron_h"]
    kinds = [*settings["layers_block_type"], *mtp_types]
    return {"with mtp": (family, settings | {"layers_block_type": kinds, "intermediate_size": 112} | changes)}


@dataclass
class PublishedNemotron(Published):
    """The last `num_sublayers` layers on disk are the MTP layer's."""

    num_sublayers: int

    @torch.no_grad()
    def made(self, token_ids: list[int]) -> Tensor:
        inner = self.oracle.model
        x_TD = inner.embeddings(torch.tensor([token_ids]))
        for layer in inner.layers[: -self.num_sublayers]:
            x_TD = self._through(layer, x_TD)
        return inner.norm_f(x_TD)[0]

    @torch.no_grad()
    def mtp_hidden(self, token_ids: list[int], before_TD: Tensor) -> Tensor:
        inner, extra = self.oracle.model, self.extra
        token_TD = self._normed(inner.embeddings(torch.tensor(token_ids)), extra["enorm"])
        x_TD = (torch.cat((token_TD, self._normed(before_TD, extra["hnorm"])), dim=1) @ extra["eh_proj"].T)[None]
        for layer in inner.layers[-self.num_sublayers :]:
            x_TD = self._through(layer, x_TD)
        return self._normed(x_TD[0], extra["final_layernorm"])

    def _through(self, layer: Any, x_TD: Tensor) -> Tensor:
        later = torch.full((x_TD.shape[1], x_TD.shape[1]), float("-inf")).triu(1)[None, None]
        attends = layer.block_type == "full_attention"
        found: Tensor = layer(x_TD, attention_mask=later if attends else None)
        return found

    def _normed(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        eps = self.oracle.config.layer_norm_epsilon
        return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D


def publish_as_nemotron(checkpoint: Any, num_sublayers: int = 2) -> PublishedNemotron:
    """Give the last layers on disk the names of an MTP layer, as published, with the tensors around them."""
    folder, width = checkpoint.folder, checkpoint.oracle.config.hidden_size
    kinds = checkpoint.oracle.config.layers_block_type
    num_layers = len(kinds) - num_sublayers
    extra = {name: torch.rand(width) + 0.5 for name in ("enorm", "hnorm", "final_layernorm")}
    extra["eh_proj"] = torch.randn(width, 2 * width) * 0.1
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in extra.items():
        index = num_sublayers - 1 if name == "final_layernorm" else 0
        tensors[f"mtp.layers.{index}.{name}.weight"] = tensor
    for index in range(num_sublayers):
        prefix = f"backbone.layers.{num_layers + index}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            tensors[name.replace(prefix, f"mtp.layers.{index}.")] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    edit_config(
        folder, **{COUNTED: 1, "layers_block_type": kinds[:num_layers], "mtp_layers_block_type": kinds[num_layers:]}
    )
    return PublishedNemotron(folder, checkpoint.oracle, extra, num_sublayers)


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        (["full_attention", "moe"], {}),
        (["full_attention", "moe"], {"moe_latent_size": 32}),
        (["full_attention", "mlp"], {"mlp_bias": True}),
        (["full_attention"], {}),
    ],
)
def test_mtp_layer_of_nemotron_matches_plain_torch(
    make_checkpoint: Callable[..., Any], kinds: list[str], changes: dict[str, Any]
) -> None:
    made = publish_as_nemotron(make_checkpoint("with mtp", variants=variant_with(*kinds, **changes)), len(kinds))
    listed = read_spec(made.folder)
    assert ignored_keys(made.folder) == []
    edit_config(made.folder, mtp_layers_block_type=None)
    edit_config(made.folder, mtp_hybrid_override_pattern="".join(LETTERS[kind] for kind in kinds))
    assert read_spec(made.folder) == listed, "a pattern says the same"
    check_says_what_plain_torch_says(made)


def test_mtp_layer_of_nemotron_has_experts_unless_the_configuration_says_otherwise() -> None:
    config = NEMOTRON_3_NANO
    assert spec_from_config(config | {COUNTED: 0}).mtp is None
    spec = spec_from_config(config | {COUNTED: 1, "mtp_layers_block_type": None})
    assert spec.mtp is not None and isinstance(spec.mtp.ffn, MoeSpec)
    assert spec_from_config(config | {COUNTED: 2}).mtp == spec.mtp, "the first one of several"


@pytest.mark.parametrize("pattern", ["ME", "*M", "*EE", "E*"])
def test_mtp_layers_with_other_parts_are_refused(pattern: str) -> None:
    config = NEMOTRON_3_NANO | {COUNTED: 1, "mtp_layers_block_type": None}
    with pytest.raises(UnsupportedModelError, match=r"an MTP layer of .* is not supported in nemotron_h; known: full_"):
        spec_from_config(config | {"mtp_hybrid_override_pattern": pattern})


def test_nemotron_is_served_without_its_mtp_layer_and_says_what_is_missing(make_checkpoint: Callable[..., Any]) -> None:
    made = publish_as_nemotron(make_checkpoint("with mtp", variants=variant_with("full_attention", "moe")))
    ids = [3, 5, 8, 13]
    driver = Driver(made.folder, dtype="float32")
    driver.read(0, ids)
    assert driver.mtp.vocabulary is driver.model.vocabulary
    edit_weights(made.folder, lambda tensors: tensors.pop("mtp.layers.0.eh_proj.weight"))
    assert read_spec(made.folder) == load_model(made.folder, device="cpu", dtype="float32").spec
    with pytest.raises(WeightsError, match=r"has an MTP layer.* have no mtp.layers.0.eh_proj.weight"):
        load_model(made.folder, device="cpu", dtype="float32", keeps_hidden=True)
