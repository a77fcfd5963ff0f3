"""Several MTP layers against plain torch: layer k reads, at each position i, token i + 1 + k and the hidden state of
layer k - 1, before which comes the model (DeepSeek-V3, section 2.2). In MiMo-V2 each layer reads that of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from moiety_engine.messages import CoreSubmit
from moiety_engine.model.errors import WeightsError
from moiety_engine.model.families import ignored_keys, read_spec
from moiety_engine.model.loading import load_model, load_mtp
from moiety_engine.mtp_and_draft_model.draft_model import DraftModel
from moiety_engine.runner.control_messages import ControlSender
from moiety_engine.runner.sizes import Sizes
from moiety_engine.scheduling.plan import Chunk, DraftCatchUp, Plan
from moiety_engine.sequence import PENDING, Sequence
from moiety_wire.classes import BATCH
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.messages import Sampling

from .test_mtp_spec import BLOCK_SIZE, COUNTED, TOKENS, Driver, Published, edit_config, edit_weights
from .variants import OTHERS

NUM_LAYERS = 3
CHAINED, OF_MODEL = "deepseek_v3, as wide as blocks", "mimo_v2_flash, a dense last layer"
NAMES = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")


class PublishedLayers(Published):
    """A checkpoint whose last `NUM_LAYERS` layers are MTP layers; `extras` has the tensors around each."""

    def __init__(self, folder: Path, oracle: Any, extras: list[dict[str, Tensor]], *, reads_model: bool) -> None:
        super().__init__(folder, oracle, extras[0])
        self.extras, self.reads_model = extras, reads_model

    @torch.no_grad()
    def made(self, token_ids: list[int]) -> Tensor:
        inner = self.oracle.model
        x_TD = inner.embed_tokens(torch.tensor([token_ids]))
        for layer in inner.layers[:-NUM_LAYERS]:
            x_TD = self._through(layer, x_TD)
        return inner.norm(x_TD)[0]

    @torch.no_grad()
    def layer_hidden(self, index: int, token_ids: list[int], before_TD: Tensor) -> Tensor:
        """Return the output of a layer for each token and the hidden state before it, after its norm."""
        inner, extra = self.oracle.model, self.extras[index]
        token_TD = self._normed(inner.embed_tokens(torch.tensor(token_ids)), extra["enorm.weight"])
        both_TJ = torch.cat((token_TD, self._normed(before_TD, extra["hnorm.weight"])), dim=1)
        layer = inner.layers[index - NUM_LAYERS]
        x_TD = self._through(layer, (both_TJ @ extra["eh_proj.weight"].T)[None])[0]
        return self._normed(x_TD, extra["shared_head.norm.weight"])

    def drafts(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """Return the likeliest tokens after `token_ids` by one layer each, and then by the last layer again."""
        model_TD = self.made(token_ids)[:-1]
        before_TD, found = model_TD, list[int]()
        for number in range(num_drafts):
            index = min(number, NUM_LAYERS - 1)
            hidden_TD = self.layer_hidden(index, (token_ids + found)[1 + index :], before_TD)
            found.append(int(self.logprobs(hidden_TD[-1]).argmax()))
            if number + 1 >= NUM_LAYERS:
                before_TD = torch.cat((before_TD, hidden_TD[-1:]))
            elif not self.reads_model:
                before_TD = hidden_TD
        return found


def publish_layers(make_checkpoint: Callable[..., Any], variant: str) -> PublishedLayers:
    family, settings = OTHERS[variant]
    more: dict[str, Any] = {"num_hidden_layers": 1 + NUM_LAYERS}
    if variant == OF_MODEL:
        more = {"num_hidden_layers": 2 + NUM_LAYERS, "mlp_layer_types": ["dense", "sparse", *["dense"] * NUM_LAYERS]}
        more["layer_types"] = ["full_attention", *["sliding_attention"] * (1 + NUM_LAYERS)]
    made = make_checkpoint("more", variants={"more": (family, settings | more)})
    folder, width = made.folder, made.oracle.config.hidden_size
    num_layers = more["num_hidden_layers"] - NUM_LAYERS
    tensors, extras = load_file(folder / "model.safetensors"), list[dict[str, Tensor]]()
    for index in range(NUM_LAYERS):
        extra = {name: torch.rand(width) + 0.5 for name in NAMES}
        extra["eh_proj.weight"] = torch.randn(width, 2 * width) * 0.1
        extras.append(extra)
        tensors |= {f"model.layers.{num_layers + index}.{name}": one.clone() for name, one in extra.items()}
    changes: dict[str, Any] = {"num_hidden_layers": num_layers}
    if variant == OF_MODEL:
        tensors = as_mimo(tensors, num_layers)
        config = json.loads((folder / "config.json").read_text())
        changes |= {key: config[key][:num_layers] for key in ("layer_types", "mlp_layer_types")}
    else:
        changes[COUNTED] = NUM_LAYERS
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, **changes)
    return PublishedLayers(folder, made.oracle, extras, reads_model=variant == OF_MODEL)


def as_mimo(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Give the MTP layers the names of MiMo-V2, with numbers of their own."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        index = int(name.split(".")[2]) - num_layers if name.startswith("model.layers.") else -1
        if index < 0:
            found[name] = tensor
            continue
        own = name.split(".", 3)[3].replace("shared_head.norm", "final_layernorm")
        found[f"model.mtp.layers.{index}.{own.replace('post_attention_layernorm', 'pre_mlp_layernorm')}"] = tensor
    return found


@pytest.fixture(params=[CHAINED, OF_MODEL])
def published(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Any]) -> PublishedLayers:
    return publish_layers(make_checkpoint, request.param)


def test_each_mtp_layer_says_what_plain_torch_says_in_chunks(published: PublishedLayers) -> None:
    driver = Driver(published.folder, dtype="float32")
    assert len(driver.mtp_layers) == NUM_LAYERS
    num_read = len(TOKENS) - NUM_LAYERS
    before_TD = model_TD = published.made(TOKENS)[:num_read]
    expected = []
    for index in range(NUM_LAYERS):
        tokens = TOKENS[1 + index : 1 + index + num_read]
        hidden_TD = published.layer_hidden(index, tokens, before_TD)
        expected.append(published.logprobs(hidden_TD))
        before_TD = model_TD if published.reads_model else hidden_TD
    first, found = 0, [list[Tensor]() for _ in range(NUM_LAYERS)]
    for size in (40, 1, 1, 7, num_read - 49):
        driver.read(first, TOKENS[first : first + size])
        read_TD: Tensor | None = None
        for index in range(NUM_LAYERS):
            tokens = TOKENS[first + 1 + index : first + 1 + index + size]
            said_TD = driver.run_mtp_layer(first, tokens, read_TD, index)
            read_TD = None if published.reads_model else said_TD
            found[index].append(driver.mtp_layers[index].logits(said_TD).log_softmax(-1))
        first += size
    for ours, theirs in zip(found, expected, strict=True):
        assert (torch.cat(ours) - theirs).abs().max() <= 1e-4


class Drafts:
    """MTP layers as the engine runs them, for two sequences whose tokens the model reads."""

    def __init__(self, published: PublishedLayers) -> None:
        self.driver = Driver(published.folder, dtype="float32")
        sizes, ticks = Sizes(BLOCK_SIZE, 64, 4, 128, 8, 0, graphs=False), count(10**18, 10**7)
        controls = ControlSender(None, overlaps=False, steps_in_flight=1)
        self.draft = DraftModel(self.driver.mtp_layers, sizes, lambda: next(ticks), controls)
        self.draft.allocate(self.driver.kv)
        self.sequences, self.num_read = [], [0, 0]
        for key, blocks in enumerate(([5, 2, 7, 0], [4, 1, 3, 6])):
            prompt = TOKENS[10 * key : 10 * key + 24 + 3 * key]
            submit = CoreSubmit(key, "t", BATCH, prompt, Sampling(temperature=0.0), 60, 0, [], 60, b"s", 0)
            sequence = Sequence(submit, order=key, seed=0)
            sequence.kv.blocks = blocks
            self.sequences.append(sequence)

    def tokens(self, key: int) -> list[int]:
        return list(self.sequences[key].tokens)

    def read(self, key: int) -> None:
        """Let the model read all tokens but the newest one."""
        sequence = self.sequences[key]
        self.driver.blocks = sequence.kv.blocks
        self.driver.read(self.num_read[key], sequence.tokens[self.num_read[key] : -1])
        self.num_read[key] = len(sequence.tokens) - 1

    def fill(self, lengths: dict[int, int], catch_ups: dict[int, int], sampled_L: Tensor | None = None) -> Plan:
        chunks = [
            Chunk(self.sequences[key], 1 + length, True, draft=(PENDING,) * length) for key, length in lengths.items()
        ]
        behind = [DraftCatchUp(self.sequences[key], size) for key, size in catch_ups.items()]
        plan = Plan(chunks, len(chunks), sum(chunk.num_tokens for chunk in chunks), [], catch_ups=behind)
        return self.draft.fill(plan, sampled_L)


# lengths of drafts by sequence, catch-ups by sequence, and how many draft tokens come true then
ROUNDS: list[tuple[dict[int, int], dict[int, int], int]] = [
    ({1: 5}, {0: 7}, 1),
    ({0: 2, 1: 3}, {}, 0),
    ({0: 4, 1: 1}, {}, 3),
    ({0: 6}, {1: 2}, 2),
    ({0: 0, 1: 4}, {}, 4),
    ({1: 2, 0: 3}, {}, 9),
]


def test_drafts_of_several_layers_are_those_of_plain_torch(published: PublishedLayers) -> None:
    """Through drafts of any length, accepted or not, prompts that are taken in piece by piece, and pending tokens."""
    drafts = Drafts(published)
    drafts.draft.warm_up()
    for number, (lengths, catch_ups, num_right) in enumerate(ROUNDS):
        for key in (0, 1):
            drafts.read(key)
        expected = {key: published.drafts(drafts.tokens(key), size) for key, size in lengths.items()}
        sampled_L = None
        if number % 2:  # the newest tokens are not known to the host yet
            sampled_L = torch.tensor([999, *(drafts.tokens(key)[-1] for key in (0, 1))])
            for key, sequence in enumerate(drafts.sequences):
                sequence.tokens[-1], sequence.pending_row = PENDING, 1 + key
        plan = drafts.fill(lengths, catch_ups, sampled_L)
        assert {chunk.sequence.key: list(chunk.draft) for chunk in plan.chunks} == expected
        for key, sequence in enumerate(drafts.sequences):
            if sampled_L is not None:
                sequence.tokens[-1], sequence.pending_row = int(sampled_L[1 + key]), -1
            right = expected.get(key, [])[:num_right]
            sequence.tokens += [*right, TOKENS[60 + number + 20 * key]]


def remove(prefix: str, tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def test_missing_mtp_layers_are_said_and_random_ones_are_as_many_as_the_configuration_says(
    published: PublishedLayers,
) -> None:
    folder = published.folder
    assert len(read_spec(folder).mtp_layers) == NUM_LAYERS
    assert ignored_keys(folder) == []
    prefix = "model.mtp.layers." if published.reads_model else "model.layers."
    first = 0 if published.reads_model else published.oracle.config.num_hidden_layers - NUM_LAYERS
    how: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    for index, left in ((2, 2), (1, 1)):
        edit_weights(folder, partial(remove, f"{prefix}{first + index}."))
        model = load_model(folder, keeps_hidden=True, **how)
        with capture_logs() as logs:
            assert len(load_mtp(folder, model, **how)) == left
        assert [(one["event"], one["num_found"]) for one in logs if "mtp" in one["event"]] == [
            ("mtp_layers_missing", left)
        ]
    dummy = load_model(folder, load_format=LoadFormat.DUMMY, keeps_hidden=True, **how)
    assert len(load_mtp(folder, dummy, load_format=LoadFormat.DUMMY, **how)) == NUM_LAYERS
    edit_weights(folder, partial(remove, f"{prefix}{first}."))
    with pytest.raises(WeightsError, match="has an MTP layer"):
        load_model(folder, keeps_hidden=True, **how)
