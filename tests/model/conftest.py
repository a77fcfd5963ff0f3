"""Small random checkpoints written by transformers' own classes, and a driver that steps our model by hand.

The driver allocates blocks in a random order, fills the cache with NaN first and builds a Batch as the runner does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_engine.config import OffloadConfig
from moiety_engine.model.batch import Batch, RecurrentRows
from moiety_engine.model.loading import load_model
from moiety_engine.model.transformer import Transformer

from .variants import CLASS_OF, NOT_AUTOMATIC, OTHERS, SMALL, VARIANTS

NUM_STATES = 8  # of a driver
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass
class Checkpoint:
    """A folder, and transformers' model of it in float32 as the oracle."""

    folder: Path
    oracle: Any
    vocab_size: int

    @torch.no_grad()
    def logprobs(self, token_ids: list[int]) -> Tensor:
        return self.oracle(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def write_checkpoint(
    folder: Path,
    variant: str,
    *,
    dtype: torch.dtype = torch.float32,
    variants: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
) -> Checkpoint:
    """Write a random checkpoint of a variant, among VARIANTS and OTHERS if no other ones are given."""
    import transformers
    from transformers import AutoConfig

    family, more = (variants or VARIANTS | OTHERS)[variant]
    torch.manual_seed(sum(map(ord, variant)))
    config = AutoConfig.for_model(CLASS_OF.get(family, family), **(SMALL | more))
    model_class: Any = getattr(transformers, NOT_AUTOMATIC.get(family, "AutoModelForCausalLM"))
    made = model_class._from_config if family in NOT_AUTOMATIC else model_class.from_config
    oracle = made(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in itertools.chain(oracle.named_parameters(), oracle.named_buffers()):
            if name.endswith("tid2eid"):  # the experts of each token, all of them distinct
                experts = torch.rand(len(parameter), config.n_routed_experts).argsort(dim=1)
                parameter.copy_(experts[:, : parameter.shape[1]])
            elif "norm" in name and not any(part in name for part in (".fc", "attn_norm.attn.")):  # these are products
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("balancing_biases"):
                parameter.normal_(std=0.01)  # near the differences of scores, so that tokens choose different experts
                if dtype is not torch.float32:
                    parameter[-1] = -1.0  # as transformers sets it where it reads a file
            elif ".gate.router_mlp." in name:
                parameter.mul_(3)  # as initialized, the scores of all experts are nearly the same
            elif name.endswith(("layer_scalar", "router.scale", "expert_scale", "states_scale", "residual_scale")):
                parameter.uniform_(0.5, 1.5)
            elif "conv1d" in name:
                parameter.normal_(std=0.5)  # as initialized, its output is nearly zero, and inexact
            elif name.endswith("A_log"):
                parameter.uniform_(-3, 0)  # as initialized, a state decays at once
            elif not parameter.any():  # routers and sinks that start at zero
                parameter.normal_(std=0.15)
    oracle.save_pretrained(folder)
    if family in CLASS_OF:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": family}))
    if dtype is not torch.float32:  # read again, since rotary frequencies were rounded with the weights
        oracle = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return Checkpoint(folder, oracle, config.vocab_size)


@pytest.fixture(scope="session", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Sequence:
    """Tokens, how many of them are in the cache, and the blocks that hold them."""

    token_ids: list[int]
    num_stored: int = 0
    blocks: list[int] = field(default_factory=list)
    state_slot: int = -1  # of a model with recurrent layers


class Driver:
    """Steps a model over sequences, as the engine's runner would."""

    def __init__(self, model: Transformer, *, num_blocks: int = 160, block_size: int = 16) -> None:
        self.model, self.block_size = model, block_size
        self.kv = model.allocate_kv(num_blocks, block_size, NUM_STATES if model.spec.recurrent_layers else 0)
        for layer in (*self.kv.layers, *self.kv.states):
            for part in layer.parts:
                part.fill_(float("nan") if part.is_floating_point() else 127)
        generator = torch.Generator().manual_seed(0)
        self.free = torch.randperm(num_blocks, generator=generator).tolist()
        self.free_states = torch.randperm(NUM_STATES, generator=generator).tolist()

    def share_prefix(self, owner: Sequence, token_ids: list[int]) -> Sequence:
        """A sequence that reuses the owner's whole blocks as far as the tokens agree."""
        pairs = zip(owner.token_ids, token_ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        whole = min(same, owner.num_stored, len(token_ids) - 1) // self.block_size
        return Sequence(list(token_ids), whole * self.block_size, owner.blocks[:whole])

    def step(self, chunks: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Run the next n tokens of each sequence in one batch; all their logits, sequence by sequence."""
        order = sorted(range(len(chunks)), key=lambda i: chunks[i][1] != 1)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, begins = [0], []
        for index in order:
            sequence, n = chunks[index]
            begins.append(not sequence.num_stored)
            if self.kv.num_state_slots and sequence.state_slot < 0:
                sequence.state_slot = self.free_states.pop()
            end = sequence.num_stored + n
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            ids += sequence.token_ids[sequence.num_stored : end]
            for position in range(sequence.num_stored, end):
                positions.append(position)
                block = sequence.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            sequence.num_stored = end
            starts.append(len(ids))
        ordered = [chunks[i][0] for i in order]
        widest = max(len(sequence.blocks) for sequence in ordered)
        table = [sequence.blocks + [0] * (widest - len(sequence.blocks)) for sequence in ordered]
        device = self.model.device
        logits = self.model.forward(
            Batch(
                token_ids_T=torch.tensor(ids, device=device),
                positions_T=torch.tensor(positions, device=device),
                slots_T=torch.tensor(slots, device=device),
                query_start_S1=torch.tensor(starts, dtype=torch.int32, device=device),
                context_len_S=torch.tensor([s.num_stored for s in ordered], dtype=torch.int32, device=device),
                block_table_SB=torch.tensor(table, dtype=torch.int32, device=device),
                wanted_rows_L=torch.arange(len(ids), device=device),
                num_decode=sum(1 for _, n in chunks if n == 1),
                max_context=max(s.num_stored for s in ordered),
                max_query=max(n for _, n in chunks),
                states=self._states(starts, ordered, begins) if self.kv.num_state_slots else None,
            ),
            self.kv,
        ).cpu()
        parts = logits.split([end - start for start, end in itertools.pairwise(starts)])
        results: list[Tensor] = [logits] * len(chunks)
        for index, part in zip(order, parts, strict=True):
            results[index] = part
        return results

    def _states(self, starts: list[int], sequences: list[Sequence], begins: list[bool]) -> RecurrentRows:
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        device = self.model.device
        return RecurrentRows(
            run_start_R1=torch.tensor(starts, dtype=torch.int32, device=device),
            slots_R=torch.tensor([one.state_slot for one in sequences], device=device),
            has_state_R=torch.tensor([not one for one in begins], dtype=torch.int32, device=device),
            num_single=lengths.count(1),
            max_run=max(lengths),
        )

    def prefill(self, sequence: Sequence, chunk: int) -> Tensor:
        """Run what is not yet stored, `chunk` tokens at a time; logits of all those tokens."""
        logits = []
        while (left := len(sequence.token_ids) - sequence.num_stored) > 0:
            logits += self.step([(sequence, min(chunk, left))])
        return torch.cat(logits)


@pytest.fixture
def make_driver() -> Any:
    def make(
        folder: Path,
        device: str = "cpu",
        dtype: str = "float32",
        quantization: str = "auto",
        moe_kernel: str = "auto",
        batch_invariant: bool = False,
        offload: OffloadConfig | None = None,
        **sizes: int,
    ) -> Driver:
        model = load_model(
            folder,
            device=device,
            dtype=dtype,
            quantization=quantization,
            moe_kernel=moe_kernel,
            batch_invariant=batch_invariant,
            offload=offload or OffloadConfig(),
        )
        return Driver(model, **sizes)

    return make


@pytest.fixture
def make_sequence() -> Any:
    return Sequence


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Any:
    def make(variant: str, **options: Any) -> Checkpoint:
        return write_checkpoint(tmp_path, variant, **options)

    return make
