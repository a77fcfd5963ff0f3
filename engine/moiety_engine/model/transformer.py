"""Forward pass of the decoder over a paged KV cache, for inference only. Independent of requests and text.

T tokens of the step, D model width, L rows whose results are wanted, V vocabulary.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_engine.model.adapter_stacks import AdapterStacks
from moiety_engine.model.batch import Batch, KvCache
from moiety_engine.model.cache_groups import cache_groups
from moiety_engine.model.expert_choices import begin_count, count_nothing
from moiety_engine.model.expert_migration import SlotWeights, with_experts
from moiety_engine.model.expert_setup import expert_shape
from moiety_engine.model.hyper_connections import residual_shape
from moiety_engine.model.kv_allocation import KvAllocation, LargestAllocation
from moiety_engine.model.layer_stack import LayerStack
from moiety_engine.model.mtp_input import MtpInput
from moiety_engine.model.pending_pass import PendingPass
from moiety_engine.model.recorded_pass import record_programs
from moiety_engine.model.residual_weights import scale_term
from moiety_engine.model.residuals import times
from moiety_engine.model.rotary import rotation_of
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.model.transformer_options import TransformerOptions
from moiety_engine.model.vision_encoder import VisionEncoder
from moiety_engine.model.vocabulary import Vocabulary
from moiety_engine.model.weight_offload import OffloadableModel, WeightOffload
from moiety_engine.model.weights import ModelWeights, MoeWeights
from moiety_engine.moe.load import ExpertCounter
from moiety_engine.moe.tenants import NUM_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.adapter_stacks import Key
    from moiety_engine.model.decode_programs import Decodes, Replayed
    from moiety_engine.model.layers import RecurrentLayer
    from moiety_engine.moe.expert_slots import ExpertSlots

_PLAIN = TransformerOptions()


class Transformer(OffloadableModel):
    """Decoder with its weights.

    `expert_counter` counts the experts of tokens in batches with `owner_T`; None if the model has no experts.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        options: TransformerOptions = _PLAIN,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """Create the model.

        `weights`: weights of the spec, or a rank's part of them. `vocabulary`: another model's, for a model without
        one.
        """
        arithmetic, ranks, expert_cache = options.arithmetic, options.ranks, options.expert_cache
        self.spec, self.ranks, self.arithmetic = spec, ranks, arithmetic
        self._own = own = own_spec(spec, ranks.rank_position)
        self.device, self.dtype = weights.embedding_VD.device, weights.embedding_VD.dtype
        self.activation_dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        self.kv_dtype = options.kv_dtype or self.activation_dtype
        self._first_layer = ranks.rank_position.layers_of(len(spec.layers)).start
        self._has_expert_ranks = ranks.rank_position.layout.ffn_ranks > 0
        self.experts = expert_shape(spec, weights, ranks.rank_position, options.expert_bytes)
        self.expert_counter = None if self.experts is None else ExpertCounter(self.experts, NUM_SLOTS, self.device)
        self.adapters = AdapterStacks(spec, ranks.rank_position, self.device, self.activation_dtype)
        self._weights = weights
        self.keeps_hidden = keeps_hidden = options.keeps_hidden
        self.cache_groups = cache_groups(
            spec, keep_everything=not options.frees_windows, one_shape=self.kv_dtype is torch.int8
        )
        kv_form = self.kv_dtype, self.activation_dtype, prod(residual_shape(1, spec)) if keeps_hidden else None
        dcp = ranks.rank_position.layout.dcp
        self._kv_allocation = KvAllocation(own.layers, self._first_layer, self.cache_groups, *kv_form, num_shards=dcp)
        self._largest = LargestAllocation(spec, ranks.rank_position.layout, self.cache_groups, *kv_form)
        self.vocabulary = vocabulary or Vocabulary(spec.vocab_size, weights, ranks.tensor, arithmetic)
        self._mtp_input = None if weights.mtp_input is None else MtpInput(spec, weights.mtp_input, arithmetic)
        self.vision: VisionEncoder | None = None
        if spec.vision is not None and weights.vision is not None:
            self.vision = VisionEncoder(spec.vision, weights.vision, arithmetic, self.activation_dtype)
        self._weight_offload = WeightOffload(weights)
        on_cpu_alone = self.device.type == "cpu" and self.kv_dtype in (torch.float32, torch.bfloat16)  # without torch
        one_stream = spec.streams is None  # a recording returns nothing but the final norm
        recordable = on_cpu_alone and one_stream and ranks.everyone.size == 1 and expert_cache is None
        self._programs = record_programs(self) if recordable else None
        self.expert_cache = expert_cache
        self._layers = LayerStack(own, spec, weights, options, self.adapters)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens on each rank, at most."""
        return self._largest.block_bytes(block_size)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state on each rank, at most; 0 for a model without recurrent layers."""
        return self._largest.state_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of one token's inputs of recurrent layers, which a state slot records of a draft."""
        return self._largest.record_bytes

    def allocate_kv(
        self, num_blocks: int, block_size: int, num_state_slots: int = 0, num_record_tokens: int = 0
    ) -> KvCache:
        """Return a new KV cache for the model, in its `kv_dtype`, with undefined content."""
        return self._kv_allocation.allocate(
            num_blocks, block_size, num_state_slots, num_record_tokens, self.device, rotation_of(self.spec)
        )

    @property
    def recurrent(self) -> dict[int, RecurrentLayer]:
        """Layers of the stage that can replay tokens, by index."""
        return self._layers.recurrent

    @property
    def only_kernels(self) -> bool:
        """Return whether the layers are known to run without torch operations, on the kernels' own threads."""
        return self._programs is not None and self._programs.only_kernels

    @property
    def offloads(self) -> bool:
        """Return whether experts are offloaded, with some cached on the device."""
        return self.expert_cache is not None

    def offload_weights(self, on_progress: Callable[[], None], folder: str = "") -> int:
        if self._programs is not None:
            self._programs.forget()
        return super().offload_weights(on_progress, folder)

    def settle(self, timeout_s: float) -> None:
        """Wait until the weights are in large pages, for at most `timeout_s`."""
        self._weight_offload.settle(timeout_s)

    def lay_out_adapters(self, keys: frozenset[Key], num_slots: int, rank: int, moves: Mapping[int, int]) -> None:
        """Call `AdapterStacks.lay_out`, and discard recorded programs, which hold the factors' old addresses."""
        if self._programs is not None:
            self._programs.forget()
        self.adapters.lay_out(keys, num_slots, rank, moves)

    def reserve_expert_counts(self, num_chunks: int, *, keeps_bits: bool) -> None:
        """Make room to count the experts of steps with so many chunks; see `ExpertCounter.reserve`.

        Discards recorded programs if they hold old addresses. Call it before steps are captured.
        """
        counter = self.expert_counter
        if counter is not None and counter.reserve(num_chunks, keeps_bits=keeps_bits) and self._programs is not None:
            self._programs.forget()

    def slots_of(self, layer: int) -> ExpertSlots | None:
        """Return the expert slots of a layer, an index over all pipeline stages.

        Returns None for layers of other stages, layers with all experts on this rank, and layers without experts.
        """
        place = layer - self._first_layer
        return self._layers.slots[place] if 0 <= place < len(self._layers.slots) else None

    def require_part(self, rank_position: RankPosition) -> None:
        """Raise InvalidConfig with the reason if a rank at this position cannot have its part of the model."""
        own_spec(self.spec, rank_position)

    def use_expert_ranks(self, rank_position: RankPosition, experts: ModelWeights | None = None) -> None:
        """Send rows to the ranks that have the experts in this layout from now on.

        All ranks call it between the same two steps, with the groups of the layout. `experts`: weights of this rank's
        experts (see `expert_part`), if there are no expert ranks any more.
        """
        self.adapters.move_to(rank_position)
        has_expert_ranks = rank_position.layout.ffn_ranks > 0
        if has_expert_ranks is not self._has_expert_ranks:
            self._has_expert_ranks = has_expert_ranks
            self._move_experts(rank_position, experts)
            return
        for table in self._layers.slots:
            if table is not None:
                num_experts = table.placement.num_experts
                slots, parts = rank_position.layout.slots(num_experts), rank_position.layout.ep
                table.replace_parts(slots, num_experts, num_parts=parts, own_part=rank_position.ep_rank)

    def _move_experts(self, rank_position: RankPosition, experts: ModelWeights | None) -> None:
        """Free this rank's experts, which expert ranks have now, or use `experts`, which these had before."""
        self._own = own_spec(self.spec, rank_position)
        self._weights = with_experts(self._weights, experts)
        self._weight_offload = WeightOffload(self._weights)
        self._layers.use_experts(self._own, self._weights)

    def slot_weights(self, layer: int) -> SlotWeights | None:
        """Return the weights in this rank's expert slots of a layer, an index over all pipeline stages.

        Returns None if other ranks have them, and where `slots_of` returns None.
        """
        slots = self.slots_of(layer)
        if slots is None or self.ranks.crossings:
            return None
        weights = self._weights.layers[layer - self._first_layer].ffn
        assert isinstance(weights, MoeWeights)
        of_experts = self.adapters.layers[layer - self._first_layer].of_held_experts(slots.num_held)
        return SlotWeights(weights, slots.num_held, self.ranks.rank_position, of_experts)

    def forward(self, batch: Batch, kv: KvCache) -> Tensor:
        """Store the batch's tokens in the cache and return logits_LV, float32, of the wanted rows."""
        return self.logits(self.hidden(batch, kv))

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: KvCache, on_stored: Callable[[int], None] | None = None) -> Tensor:
        """Store the batch's tokens in the cache and return hidden_LD, after the final norm, of the wanted rows.

        The first group of ranks gets the rows of all groups. See `begin_pass`.
        """
        return self.end_pass(self.begin_pass(batch, kv, on_stored))

    @torch.inference_mode()
    def own_hidden(self, batch: Batch, kv: KvCache, *, before_TD: Tensor | None = None) -> Tensor:
        """Store the batch's tokens in the cache and return hidden_LD of this rank's group; see `begin_pass`."""
        return self._end_own_pass(self.begin_pass(batch, kv, before_TD=before_TD))

    def begin_pass(
        self,
        batch: Batch,
        kv: KvCache,
        on_stored: Callable[[int], None] | None = None,
        *,
        before_TD: Tensor | None = None,
    ) -> PendingPass:
        """Store the batch's tokens in the cache, and begin to transfer hidden_LD of the wanted rows of each group.

        Does not wait for later pipeline stages. `end_pass` must be called in the same order as this. The result has no
        meaning on pipeline stages other than the first and the last. `on_stored` is called with the
        index of each layer that has stored the tokens. `before_TD`: for an MTP layer, the served model's hidden states
        of the tokens before these. Must be called in inference mode, like `end_pass`.
        """
        pipeline = self.ranks.pipeline
        if pipeline.is_first:
            x_TD = self.vocabulary.embed(batch.token_ids_T, self.activation_dtype)
            x_TD = self.scale_input(times(self.spec.embedding_multiplier, x_TD))
            if batch.images is not None:
                x_TD = x_TD.index_copy(0, batch.images.rows_I, batch.images.features_FID[0])
            if self._mtp_input is not None and len(x_TD):  # a group may have no tokens
                assert before_TD is not None, "an MTP layer needs a model's hidden states"
                x_TD = self._mtp_input(x_TD, before_TD)
        else:
            shape = residual_shape(len(batch.token_ids_T), self.spec)
            x_TD = pipeline.receive(torch.empty(shape, dtype=self.activation_dtype, device=self.device))
            self._layers.router_inputs.receive(batch.token_ids_T)
        programs = self._programs
        recordable = on_stored is None and batch.images is None
        if programs is not None and recordable and programs.takes(batch):
            normed_TD = programs.run(x_TD, batch, kv)
        else:
            x_TD, normed_TD = self.run_layers(x_TD, self._of_shard(batch, kv), kv, on_stored)
            pipeline.send_to_next_stage(x_TD)
            if pipeline.size > 1:
                self._layers.router_inputs.send(batch.token_ids_T)
        kept_TD = normed_TD if self.spec.streams is None else x_TD.flatten(1)
        if kv.hidden is not None:
            kv.hidden.rows_NPL.flatten(0, 1).index_copy_(0, batch.slots_T, kept_TD)
            if on_stored is not None:
                on_stored(len(kv.layers))
        chained = self._mtp_input is not None and self._mtp_input.has_streams  # the next pass needs the streams
        hidden_LD = (kept_TD if chained else normed_TD).index_select(0, batch.wanted_rows_L)
        returned = pipeline.begin_return(hidden_LD)
        return PendingPass(batch, returned, self._begin_count(batch) if pipeline.size > 1 else count_nothing)

    def scale_input(self, x_TD: Tensor) -> Tensor:
        """Return the first layer's input for these embeddings, [T, D]."""
        scale = self._weights.input_scale
        return x_TD if scale is None else scale_term(x_TD, scale)

    def end_pass(self, pending: PendingPass) -> Tensor:
        """Wait for the last stage, and return hidden_LD; the first group of ranks gets the rows of all groups."""
        return self.gather_groups(self._end_own_pass(pending), pending.batch)

    def _end_own_pass(self, pending: PendingPass) -> Tensor:
        hidden_LD = pending.hidden.wait()
        pending.count_experts()
        return hidden_LD

    def gather_groups(self, hidden_LD: Tensor, batch: Batch) -> Tensor:
        """Return the rows of all groups, in the order of the step, on the first group's ranks; see `own_hidden`."""
        spread = batch.spread
        if spread is None or not self.ranks.pipeline.is_first:
            return hidden_LD
        hidden_LD = self.ranks.across.gather_rows(hidden_LD, spread.num_wanted)
        return hidden_LD if self.ranks.across.rank else hidden_LD.index_select(0, spread.order_L)

    def decode(self, step: Decodes, kv: KvCache, *, with_logits: bool) -> Replayed | None:
        """Replay a whole step in which every sequence has one wanted token; return its hidden states and logits.

        The logits may be missing unless `with_logits`. Returns None, without computing anything, if no recorded program
        matches the step.
        """
        if self._programs is None or kv.hidden is not None:
            return None
        return self._programs.decode(step, kv, with_logits=with_logits)

    @torch.inference_mode()
    def logits(self, hidden_LD: Tensor) -> Tensor:
        """Return logits_LV, float32, of hidden states after the final norm.

        Only the first rank gets all of them; other ranks get a part or none.
        """
        if not self.ranks.pipeline.is_first or self.ranks.across.rank:
            return hidden_LD[:, :0].float()
        if self._mtp_input is not None and self._mtp_input.has_streams:
            hidden_LD = self._layers.final_norm(hidden_LD.view(residual_shape(len(hidden_LD), self.spec)))
        logits_LV = self.vocabulary.logits(hidden_LD)
        logits_LV, cap = times(self.spec.logits_multiplier, logits_LV), self.spec.logit_softcap
        return logits_LV if cap is None else cap * torch.tanh(logits_LV / cap)

    def run_layers(
        self, x_TD: Tensor, batch: Batch, kv: KvCache, on_stored: Callable[[int], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of all layers of this rank's stage, and its final norm.

        Counts the chosen experts if there is only one pipeline stage.
        """
        ended = self._layers.run(x_TD, batch, kv, on_stored)
        if self.ranks.pipeline.size == 1:
            self._begin_count(batch)()
        return ended

    def _of_shard(self, batch: Batch, kv: KvCache) -> Batch:
        """Return the batch as the layers of a rank with a part of the positions see it."""
        position = self.ranks.rank_position
        dcp = position.layout.dcp
        return batch if dcp == 1 else batch.of_shard(dcp, position.dcp_rank, kv.block_size)

    def _begin_count(self, batch: Batch) -> Callable[[], None]:
        """Begin to gather the experts that the running pass chose; see `begin_count`."""
        if self.experts is None or self.expert_counter is None:
            return count_nothing
        counted = self.experts, self.expert_counter
        return begin_count(list(self._layers.chosen), batch, self.ranks, *counted, len(self.spec.layers))
