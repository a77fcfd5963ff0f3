"""Agreement of our parallelism with DeepSpeed's, on two CPU ranks in float32 with the same random weights.

It checks results, not speed: a mixture of experts whose ranks have different tokens (`--dp-attention 2 --ep 2`, and
`moe.layer.MoE` with `ep_size` 2), and the logits of dense models (`--tp 2`, and AutoTP, the tensor parallelism that
`init_inference` chooses).

DeepSpeed is installed into our environment:

    .venv/bin/pip install -c constraints.txt deepspeed
    .venv/bin/python benchmarks/deepspeed_agreement.py

Its gate chooses two experts per token and divides their weights by their sum, as Mixtral does; no token is dropped. The
dense models are small ones of transformers, whose linear layers AutoTP splits, with a sum over the ranks after some.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from moiety_engine.distribution.collectives import RankCollectives, Ranks, RowExchange
from moiety_engine.distribution.expert_all_to_all import ExactAllToAll
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.model.adapter_stacks import LayerFactors
from moiety_engine.model.arithmetic import Arithmetic
from moiety_engine.model.batch import Batch
from moiety_engine.model.dispatch import Dispatch
from moiety_engine.model.layers import MixtureOfExperts, MoeContext
from moiety_engine.model.loading import load_model
from moiety_engine.model.remote_experts import take_turns
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.weights import MoeWeights
from moiety_engine.moe.expert_slots import ExpertSlots
from moiety_kernels.environment import describe_environment
from moiety_kernels.route import RoutingSpec

RESULTS = Path(__file__).parent / "results" / "deepspeed_agreement.json"
NUM_RANKS, NUM_EXPERTS, TOP_K, WIDTH, HIDDEN = 2, 8, 2, 128, 96
DENSE: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"head_dim": 32}}
SIZES: dict[str, Any] = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.2}
NUM_TOKENS, BLOCK_SIZE = 96, 16
CASES = {"even": ((64, 64), 0.0), "uneven": ((201, 7), 0.0), "skewed": ((64, 32), 20.0)}


class Expert(nn.Module):
    """Expert module that DeepSpeed copies."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


def whole_weights(skew: float) -> dict[str, Tensor]:
    """Return the same weights on each rank.

    With `skew` nearly all tokens choose the first two experts, both on the first rank.
    """
    torch.manual_seed(0)
    router = torch.randn(NUM_EXPERTS, WIDTH) / WIDTH**0.5
    router[:2, 0] += skew
    gate_up = torch.randn(NUM_EXPERTS, 2 * HIDDEN, WIDTH) / WIDTH**0.5
    return {"router": router, "gate_up": gate_up, "down": torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5}


def ours(rank: int, whole: dict[str, Tensor], x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's result and the chosen experts."""
    rank_position = RankPosition(Layout(dp=NUM_RANKS, ep=NUM_RANKS), rank)
    held = rank_position.slots_of(NUM_EXPERTS)
    part = slice(held[0], held[-1] + 1)
    weights = MoeWeights(whole["router"], whole["gate_up"][part], whole["down"][part], None, None, None, None, None)
    spec = MoeSpec(HIDDEN, RoutingSpec(NUM_EXPERTS, TOP_K, renormalize=True), held=held)
    chosen: list[Tensor] = []
    assert dist.group.WORLD is not None
    in_order = rank_position.layout.slots(NUM_EXPERTS)
    slots = ExpertSlots(in_order, NUM_EXPERTS, num_parts=NUM_RANKS, own_part=rank, device=x_TD.device)
    exchange = RowExchange(dist.group.WORLD)
    dispatch = Dispatch(rank_position, exchange, slots, ExactAllToAll(exchange, rank_position), layer=0)
    layer = MixtureOfExperts(spec, weights, MoeContext(chosen, Arithmetic(), LayerFactors(), slots, dispatch))
    (end,) = take_turns([layer.stages(x_TD, None)])
    return end(), chosen[0]


def theirs(rank: int, whole: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    from deepspeed.moe.layer import MoE

    layer = MoE(
        WIDTH, Expert(), NUM_EXPERTS, NUM_RANKS, TOP_K, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False
    ).eval()
    layer.set_deepspeed_parallelism()
    num_held = NUM_EXPERTS // NUM_RANKS
    layer.deepspeed_moe.gate.wg.weight.copy_(whole["router"])
    for place, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        expert.gate_up.weight.copy_(whole["gate_up"][rank * num_held + place])
        expert.down.weight.copy_(whole["down"][rank * num_held + place])
    result: Tensor = layer(x_TD)[0]
    return result


def write_dense(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for family, more in DENSE.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more)).save_pretrained(folder / family)


def our_logits(rank: int, folder: Path, ids_T: Tensor) -> Tensor:
    """Return the logits of all tokens, on the first rank."""
    group = RankCollectives(dist.group.WORLD)
    ranks = Ranks(RankPosition(Layout(tp=NUM_RANKS), rank), tensor=group, everyone=group)
    model = load_model(folder, device="cpu", dtype="float32", ranks=ranks)
    count = len(ids_T)
    each_T = torch.arange(count)
    batch = Batch(
        token_ids_T=ids_T,
        positions_T=each_T,
        slots_T=each_T,
        query_start_S1=torch.tensor([0, count], dtype=torch.int32),
        context_len_S=torch.tensor([count], dtype=torch.int32),
        block_table_SB=torch.arange(count // BLOCK_SIZE, dtype=torch.int32).unsqueeze(0),
        wanted_rows_L=each_T,
        num_decode=0,
        max_context=count,
        max_query=count,
    )
    return model.forward(batch, model.allocate_kv(count // BLOCK_SIZE, BLOCK_SIZE))


def their_logits(folder: Path, ids_T: Tensor) -> tuple[Tensor, float]:
    """Return DeepSpeed's logits and the share of the layers' weights on a rank."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    before = sum(one.numel() for one in model.model.layers.parameters())
    engine = deepspeed.init_inference(
        model, tensor_parallel={"tp_size": NUM_RANKS}, dtype=torch.float32, replace_with_kernel_inject=False
    )
    after = sum(one.numel() for one in engine.module.model.layers.parameters())
    return engine(ids_T.unsqueeze(0)).logits[0], after / before


def compare_dense(rank: int, folder: Path, report: dict[str, Any]) -> None:
    for family in DENSE:
        torch.manual_seed(2)
        ids_T = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
        own_TV = our_logits(rank, folder / family, ids_T)
        their_TV, share = their_logits(folder / family, ids_T)
        assert share < 1.1 / NUM_RANKS, f"each rank has {share:.0%} of the layers: AutoTP has not divided them"
        if rank == 0:
            report[family] = {
                "tokens": NUM_TOKENS,
                "share_of_layers_of_a_rank": round(share, 3),
                "largest_difference": (own_TV - their_TV).abs().max().item(),
                "largest_value": own_TV.abs().max().item(),
            }


@torch.inference_mode()
def compare(rank: int, port: int, folder: str, report: dict[str, Any]) -> None:
    """Run one rank of all cases; the first one fills in the report."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_SIZE": str(NUM_RANKS)}
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    for name, (counts, skew) in CASES.items():
        whole = whole_weights(skew)
        torch.manual_seed(1 + rank)
        x_TD = torch.randn(counts[rank], WIDTH)
        x_TD[:, 0] = x_TD[:, 0].abs() + 0.5
        own_TD, chosen_TK = ours(rank, whole, x_TD)
        found = torch.stack(((own_TD - theirs(rank, whole, x_TD)).abs().max(), own_TD.abs().max()))
        first = (chosen_TK < NUM_EXPERTS // NUM_RANKS).sum().view(1).float()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        dist.all_reduce(first)
        report[name] = {
            "tokens": counts,
            "share_of_first_rank": round(first.item() / (TOP_K * sum(counts)), 3),
            "largest_difference": found[0].item(),
            "largest_value": found[1].item(),
        }
    compare_dense(rank, Path(folder), report)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        write_dense(Path(folder))
        shared = manager.dict()
        spawn(compare, (port, folder, shared), nprocs=NUM_RANKS)
        cases = dict(shared)
    environment = describe_environment("torch", "deepspeed")
    out.write_text(json.dumps({"environment": environment, "cases": cases}, indent=1) + "\n")
    for name, case in cases.items():
        print(name, case)
        assert case["largest_difference"] < 1e-5 * max(1.0, case["largest_value"]), f"{name}: they do not agree"


if __name__ == "__main__":
    main()
