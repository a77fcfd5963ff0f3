"""The layer after the last one, against plain torch: h' = eh_proj([enorm(embed(t_{i+1})); hnorm(h_i)]), a decoder layer
over its own keys and values, a norm, and the model's head (DeepSeek-V3, section 2.2). The decoder layer is
transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moiety_engine.model.batch import Batch, KvCache, RecurrentRows
from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.families import read_spec
from moiety_engine.model.loading import load_model, load_mtp
from moiety_engine.model.spec import AttentionSpec
from moiety_engine.model.transformer import Transformer
from moiety_wire.engine_choices import LoadFormat

MIMO = "mimo_v2_flash, a dense last layer"
FAMILIES = ["deepseek_v3, as wide as blocks", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "hy_v3", MIMO]
BLOCK_SIZE = 16
TOKENS = [3 + (i * i * 31 + i * 7) % 370 for i in range(100)]
COUNTED = "num_nextn_predict_layers"


@dataclass
class Published:
    """A checkpoint with such a layer, written as published, and how to compute it."""

    folder: Path
    oracle: Any  # its last layer is the MTP layer
    extra: dict[str, Tensor]

    @torch.no_grad()
    def made(self, token_ids: list[int]) -> Tensor:
        """Return the model's hidden state of each token, after its final norm."""
        inner = self.oracle.model
        x_TD = inner.embed_tokens(torch.tensor([token_ids]))
        for layer in inner.layers[:-1]:
            x_TD = self._through(layer, x_TD)
        return inner.norm(x_TD)[0]

    @torch.no_grad()
    def mtp_hidden(self, token_ids: list[int], before_TD: Tensor) -> Tensor:
        """Return the layer's output for each token and the hidden state of the one before, after its norm."""
        inner, extra = self.oracle.model, self.extra
        token_TD = self._normed(inner.embed_tokens(torch.tensor(token_ids)), extra["enorm.weight"])
        both_TJ = torch.cat((token_TD, self._normed(before_TD, extra["hnorm.weight"])), dim=1)
        x_TD = self._through(inner.layers[-1], (both_TJ @ extra["eh_proj.weight"].T)[None])[0]
        return self._normed(x_TD, extra["shared_head.norm.weight"])

    @torch.no_grad()
    def logprobs(self, hidden_TD: Tensor) -> Tensor:
        return self.oracle.lm_head(hidden_TD).log_softmax(-1)

    def _through(self, layer: Any, x_TD: Tensor) -> Tensor:
        places = torch.arange(x_TD.shape[1])[None]
        later = torch.full((x_TD.shape[1], x_TD.shape[1]), float("-inf")).triu(1)[None, None]
        kinds = getattr(getattr(layer, "self_attn", None), "layer_type", None)
        turned = self.oracle.model.rotary_emb(x_TD, places, *([] if kinds is None else [kinds]))
        mask = None if hasattr(layer, "linear_attn") else later
        found = layer(x_TD, attention_mask=mask, position_embeddings=turned, position_ids=places)
        return found[0] if isinstance(found, tuple) else found

    def _normed(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + self.oracle.config.rms_norm_eps) * weight_D


@pytest.fixture(params=FAMILIES)
def published(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Any]) -> Published:
    """transformers writes one layer more than the model has, which becomes the one that is_mtp_layer."""
    made = publish(make_checkpoint(request.param))
    if request.param == MIMO:
        write_as_mimo(made.folder, made.oracle.config.num_hidden_layers - 1)
    elif request.param == "deepseek_v32":
        edit_config(made.folder, layer_types=None)
    return made


def publish_as_qwen(checkpoint: Any, norm_offset: float = 1.0) -> Published:
    """The same under the names of Qwen3-Next and Qwen 3.5, whose config.json need not mention the layer.

    `norm_offset`: number that the norms are stored less.
    """
    made = publish(checkpoint)
    num_layers = made.oracle.config.num_hidden_layers - 1
    tensors, prefix = load_file(made.folder / "model.safetensors"), f"model.layers.{num_layers}."
    names = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
    for ours, its in names.items():
        weight = tensors.pop(f"{prefix}{ours}.weight")
        tensors[f"mtp.{its}.weight"] = weight if its == "fc" else weight - norm_offset
    for name in [name for name in tensors if name.startswith(prefix)]:
        tensors[name.replace(prefix, "mtp.layers.0.")] = tensors.pop(name)
    for name in ("mtp.layers.0.embed_tokens.weight", "mtp.layers.0.shared_head.head.weight"):
        del tensors[name]
    save_file(tensors, made.folder / "model.safetensors")
    config = json.loads((made.folder / "config.json").read_text())
    kinds = config["layer_types"][:num_layers]
    (made.folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != COUNTED}))
    edit_config(made.folder, layer_types=kinds)
    return made


def publish(checkpoint: Any) -> Published:
    folder, width = checkpoint.folder, checkpoint.oracle.config.hidden_size
    num_layers = checkpoint.oracle.config.num_hidden_layers - 1
    extra = {name: torch.rand(width) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    extra["eh_proj.weight"] = torch.randn(width, 2 * width) * 0.1
    tensors = load_file(folder / "model.safetensors")
    copies = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    of_layer = {f"model.layers.{num_layers}.{name}": tensor for name, tensor in (extra | copies).items()}
    save_file(tensors | of_layer, folder / "model.safetensors")
    edit_config(folder, **{"num_hidden_layers": num_layers, COUNTED: 1})
    return Published(folder, checkpoint.oracle, extra)


def write_as_mimo(folder: Path, num_layers: int) -> None:
    """Give the layer the names of MiMo-V2, which has no copies of the vocabulary."""
    renamed = {"shared_head.norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"model.layers.{num_layers}.")]:
            tensor, own = tensors.pop(name), name.removeprefix(f"model.layers.{num_layers}.")
            for usual, of_mimo in renamed.items():
                own = own.replace(usual, of_mimo)
            if own not in ("embed_tokens.weight", "shared_head.head.weight"):
                tensors[f"model.mtp.layers.0.{own}"] = tensor

    edit_weights(folder, change)
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, **{key: config[key][:num_layers] for key in ("layer_types", "mlp_layer_types")})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


class Driver:
    """The model and its MTP layer, over one sequence in blocks in random order."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.model = load_model(folder, device="cpu", keeps_hidden=True, **how)
        self.mtp_layers = load_mtp(folder, self.model, device="cpu", **how)
        self.mtp = self.mtp_layers[0]
        self.blocks = [5, 2, 7, 0, 4, 1, 3, 6]
        self.kv, *self.own_kvs = (one.allocate_kv(8, BLOCK_SIZE, 1) for one in (self.model, *self.mtp_layers))
        for layer in (*(layer for own_kv in self.own_kvs for layer in own_kv.layers), *self.kv.states):
            for part in layer.parts:
                part.fill_(float("nan"))

    def read(self, first: int, token_ids: list[int]) -> None:
        """Let the model compute tokens, and keep its hidden states."""
        self._run(self.model, self.kv, first, token_ids)

    def run_mtp_layer(
        self, first: int, token_ids: list[int], before_TD: Tensor | None = None, index: int = 0
    ) -> Tensor:
        """Let an MTP layer compute tokens from position `first`, each with the hidden state of the one before."""
        assert self.kv.hidden is not None
        before_TD = (
            self.kv.hidden.rows_NPL.flatten(0, 1)[self._slots(first, token_ids)] if before_TD is None else before_TD
        )
        return self._run(self.mtp_layers[index], self.own_kvs[index], first, token_ids, before_TD=before_TD)

    def _slots(self, first: int, token_ids: list[int]) -> Tensor:
        places_T = torch.arange(first, first + len(token_ids))
        return torch.tensor(self.blocks)[places_T // BLOCK_SIZE] * BLOCK_SIZE + places_T % BLOCK_SIZE

    def _run(self, model: Transformer, kv: KvCache, first: int, token_ids: list[int], **more: Any) -> Tensor:
        count = len(token_ids)
        batch = Batch(
            token_ids_T=torch.tensor(token_ids),
            positions_T=torch.arange(first, first + count),
            slots_T=self._slots(first, token_ids),
            query_start_S1=torch.tensor([0, count], dtype=torch.int32),
            context_len_S=torch.tensor([first + count], dtype=torch.int32),
            block_table_SB=torch.tensor([self.blocks], dtype=torch.int32),
            wanted_rows_L=torch.arange(count),
            num_decode=int(count == 1),
            max_context=first + count,
            max_query=count,
            states=RecurrentRows(
                torch.tensor([0, count], dtype=torch.int32),
                torch.tensor([0]),
                torch.tensor([int(first > 0)], dtype=torch.int32),
                num_single=int(count == 1),
                max_run=count,
            ),
        )
        return model.own_hidden(batch, kv, **more)


def test_it_says_what_plain_torch_says_in_chunks_and_after_its_own_guesses(published: Published) -> None:
    check_says_what_plain_torch_says(published)


@pytest.mark.parametrize("variant", ["qwen3_next", pytest.param("qwen3_5_moe", marks=pytest.mark.thorough)])
def test_mtp_layer_of_a_model_with_recurrent_layers_matches_plain_torch(
    make_checkpoint: Callable[..., Any], variant: str
) -> None:
    check_says_what_plain_torch_says(publish_as_qwen(make_checkpoint(f"{variant}, full attention last")))


def test_mtp_layer_of_exaone_is_dense_and_named_as_that_of_qwen(make_checkpoint: Callable[..., Any]) -> None:
    made = publish_as_qwen(make_checkpoint("exaone_moe, a dense last layer"), norm_offset=0.0)
    assert read_spec(made.folder).mtp is None
    edit_config(made.folder, **{COUNTED: 1, "mlp_layer_types": ["dense", "sparse"]})
    check_says_what_plain_torch_says(made)
    edit_config(made.folder, mtp_layer_types=["full_attention"])
    layer = read_spec(made.folder).mtp
    assert layer is not None and isinstance(layer.attention, AttentionSpec) and layer.attention.window is None
    edit_config(made.folder, mtp_sliding_windows=[128])
    with pytest.raises(UnsupportedModelError, match="mtp_sliding_windows is not supported in exaone_moe"):
        read_spec(made.folder)


def test_mtp_layer_of_longcat_is_dense_and_enlarges_latent_rows(make_checkpoint: Callable[..., Any]) -> None:
    made = publish_as_longcat(make_checkpoint("longcat_flash"))
    check_says_what_plain_torch_says(made)
    edit_weights(made.folder, lambda tensors: tensors["model.mtp.embed_tokens.weight"].mul_(2))
    with pytest.raises(UnsupportedModelError, match=r"model.mtp.embed_tokens.weight differs from model.embed_tokens"):
        load_model(made.folder, device="cpu", dtype="float32", keeps_hidden=True)
    edit_config(made.folder, **{COUNTED: 0})
    assert read_spec(made.folder).mtp is None


def publish_as_longcat(checkpoint: Any) -> Published:
    """LongCat-Flash's MTP layer is one of DeepSeek-V3 whose latent rows are enlarged, under names of its own."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    folder, config = checkpoint.folder, checkpoint.oracle.config
    same: tuple[str, ...] = (
        "hidden_size",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
    )
    same += ("v_head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_parameters")
    of_layer = {name: getattr(config, name) for name in same}
    of_layer |= {"intermediate_size": config.ffn_hidden_size, "num_key_value_heads": config.num_attention_heads}
    own = DeepseekV3Config(**of_layer, attn_implementation="eager")
    layer, width = DeepseekV3DecoderLayer(own, 0).eval(), config.hidden_size
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.1)
    extra = {name: torch.rand(width) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    extra["eh_proj.weight"] = torch.randn(width, 2 * width) * 0.1
    tensors, root = load_file(folder / "model.safetensors"), "model.mtp.layers.0."
    tensors["model.mtp.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.mtp.norm.weight"] = extra["shared_head.norm.weight"]
    tensors |= {f"{root}{name}.m.weight": extra[f"{name}.weight"] for name in ("enorm", "hnorm")}
    tensors[f"{root}eh_proj.weight"] = extra["eh_proj.weight"]
    for name, tensor in layer.state_dict().items():
        tensors[root + ("transformer_layer." if name.startswith("mlp.") else "") + name] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")
    with torch.no_grad():
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.weight.mul_((width / len(norm.weight)) ** 0.5)
    checkpoint.oracle.model.layers.append(layer)
    return Published(folder, checkpoint.oracle, extra)


def check_says_what_plain_torch_says(published: Published) -> None:
    driver = Driver(published.folder, dtype="float32")
    expected_TD = published.mtp_hidden(TOKENS[1:], published.made(TOKENS)[:-1])
    first, found = 0, []
    for count in (40, 1, 1, 7, 50):
        driver.read(first, TOKENS[first : first + count])
        found.append(driver.run_mtp_layer(first, TOKENS[first + 1 : first + 1 + count]))
        first += count
    assert first == len(TOKENS) - 1
    error = driver.mtp.logits(torch.cat(found)).log_softmax(-1) - published.logprobs(expected_TD)
    assert error.abs().max() <= 1e-4
    guesses, said_TD, before_TD = [9, 250, 17], found[-1][-1:], published.made(TOKENS)[:-1]
    for number, guess in enumerate(guesses):
        before_TD = torch.cat((before_TD, expected_TD[-1:]))
        expected_TD = published.mtp_hidden(TOKENS[1:] + guesses[: number + 1], before_TD)
        said_TD = driver.run_mtp_layer(first + number, [guess], said_TD)
        error = driver.mtp.logits(said_TD).log_softmax(-1) - published.logprobs(expected_TD[-1:])
        assert error.abs().max() <= 1e-4


def test_it_is_kept_in_the_form_of_the_model_and_shares_its_vocabulary(published: Published) -> None:
    plain, narrow = (Driver(published.folder, dtype="float32", quantization=one) for one in ("none", "int8"))
    for driver in (plain, narrow):
        driver.read(0, TOKENS[:-1])
    both = [driver.mtp.logits(driver.run_mtp_layer(0, TOKENS[1:])).softmax(-1) for driver in (plain, narrow)]
    difference_T = (both[0] - both[1]).abs().amax(1)  # sparse attention may select another token here and there
    assert difference_T.max() > 0
    assert difference_T.median() < 0.1
    assert plain.mtp.vocabulary is plain.model.vocabulary


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mtp_layer_in_float8_equals_the_dequantized_one(published: Published, dtype: str) -> None:
    """As DeepSeek-V3 is published; its eh_proj is wide there, and here narrow, too."""
    folder, block = published.folder, 32

    def narrow(tensors: dict[str, Tensor], *, written_out: bool) -> None:
        for name, weight in list(tensors.items()):
            if weight.dim() == 2 and "proj" in name and "gate.weight" not in name:
                small = (weight / 0.01).to(torch.float8_e4m3fn)
                scales = [-(-side // block) for side in weight.shape]
                tensors[name] = small.float() * 0.01 if written_out else small
                tensors |= {} if written_out else {f"{name}_scale_inv": torch.full(scales, 0.01)}

    wide = load_file(folder / "model.safetensors")
    said = []
    for written_out in (True, False):
        tensors = dict(wide)
        narrow(tensors, written_out=written_out)
        save_file(tensors, folder / "model.safetensors")
        if not written_out:
            edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]})
        driver = Driver(folder, dtype=dtype)
        driver.read(0, TOKENS[:-1])
        said.append(driver.mtp.logits(driver.run_mtp_layer(0, TOKENS[1:])).softmax(-1))
    assert (said[0] - said[1]).abs().max() <= 1e-4


def test_mtp_layer_is_not_loaded_unless_requested(published: Published) -> None:
    model = load_model(published.folder, device="cpu", dtype="float32")
    assert len(model.spec.layers) == published.oracle.config.num_hidden_layers - 1
    assert model.allocate_kv(1, BLOCK_SIZE).hidden is None


@pytest.mark.parametrize("published", [one for one in FAMILIES if one != MIMO], indirect=True)
def test_a_checkpoint_without_it_is_refused_with_what_it_has(
    published: Published, make_checkpoint: Callable[..., Any]
) -> None:
    folder = published.folder
    how: dict[str, Any] = {"device": "cpu", "dtype": "float32", "keeps_hidden": True}
    edit_weights(folder, lambda tensors: tensors[next(n for n in tensors if n.endswith("head.weight"))].mul_(2))
    with pytest.raises(UnsupportedModelError, match=r"head.weight differs from lm_head.weight.*--speculate ngram"):
        load_model(folder, **how)
    edit_weights(folder, lambda tensors: tensors.pop(next(n for n in tensors if n.endswith("eh_proj.weight"))))
    with pytest.raises(
        WeightsError, match=r"has an MTP layer.* have no model.layers.1.eh_proj.weight.*as it was published"
    ):
        load_model(folder, **how)
    load_model(folder, load_format=LoadFormat.DUMMY, **how)
    edit_config(folder, **{COUNTED: 0})
    with pytest.raises(UnsupportedModelError, match=r"checkpoint with 1 layers does not have.*--speculate ngram"):
        load_model(folder, **how)
