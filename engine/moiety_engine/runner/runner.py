"""Execution of one step on the device: upload inputs, forward pass, sampling, download results.

`launch` returns as soon as the work is queued; `collect` waits for the results. At most one step may be launched before
the previous one is collected. On a CPU `launch` computes the step. In a pipeline of ranks, several steps may be
launched before the first is collected: `launch` runs the first stage, and `collect` receives the result of the last
stage and samples.

D model width, L tokens that a step samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moiety_engine.images.feature_cache import FeatureCache, features_of
from moiety_engine.kv_transfer.kv_sender import KvSender
from moiety_engine.messages import CoreLogprob, CoreScores
from moiety_engine.model.batch import Batch, KvCache
from moiety_engine.model.pending_pass import PendingPass
from moiety_engine.model.transformer import Transformer
from moiety_engine.moe.load import StepExperts
from moiety_engine.moe.tenants import TenantSlots
from moiety_engine.runner.control_messages import ControlSender, EncodeImage, ForgetImages
from moiety_engine.runner.embeddings import as_bytes, unit_vectors
from moiety_engine.runner.graphs import DecodeGraphs
from moiety_engine.runner.group_results import order_of, spread_of, with_adapter_rows
from moiety_engine.runner.inputs import BatchBuilder, HostBatch, Scored, scored
from moiety_engine.runner.masks import GrammarProblem, MaskMaker
from moiety_engine.runner.micro_batches import WHOLE, StepSplit, cut
from moiety_engine.runner.scoring import Scores, are_finite, score
from moiety_engine.runner.token_division import divide_tokens, rank_slots_of
from moiety_engine.runner.token_owners import bytes_of_chunks
from moiety_engine.sampling import Best, Drawn, Sampler, is_greedy, is_plain, rows_of
from moiety_engine.sampling.rows import Row
from moiety_engine.sampling.token_masks import TokenMasks
from moiety_engine.scheduling.plan import Plan
from moiety_engine.staging import PASSED, DeviceMark, Staging

if TYPE_CHECKING:
    from moiety_engine.model.decode_programs import Replayed  # which imports numba

_IN_ORDER = np.zeros(0, dtype=np.int64)  # order with a single rank group
_NO_KEYS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Launched step. Its results are in host memory once the mark `done` is passed."""

    plan: Plan
    drawn: Drawn | Best
    unit_ED: Tensor | None
    scores: Scores | None
    done: DeviceMark
    invalid_rows: list[GrammarProblem]  # rows whose grammars failed; their tokens are invalid
    experts: StepExperts | None = None  # experts of each chunk; None where they are not counted


@dataclass(frozen=True, slots=True)
class PipelinedStep:
    """Launched step that the later stages of a pipeline compute. Its tokens are sampled when it is collected."""

    plan: Plan
    rows: list[Row]
    begun: PendingPass
    num_scored: int
    scored: list[Scored]
    allowed: TokenMasks | None
    invalid_rows: list[GrammarProblem]  # rows whose grammars failed; their tokens are invalid
    moved_P: np.ndarray | None  # as in StepExperts


@dataclass(frozen=True, slots=True)
class StepResults:
    """Results of a step, in the plan's order.

    `token_ids` has one token for each chunk that samples, and one for each token of its draft. `vectors` has one
    embedding for each chunk that embeds; a vector that is not finite is empty. `scores` has the prompt
    log-probabilities by request key. `non_finite` are the sampled rows, counted as the tokens are, whose logits are not
    finite; their tokens are invalid. `bad_scores` are the keys of prompts whose log-probabilities are not finite.
    `experts` are those of each chunk, and None where they are not counted.
    """

    token_ids: list[int]
    logprobs: list[CoreLogprob | None]
    vectors: list[bytes]
    scores: list[tuple[int, CoreScores]]
    non_finite: frozenset[int] = frozenset()
    bad_scores: frozenset[int] = frozenset()
    experts: StepExperts | None = None


class Runner:
    """Runs steps on the device. Owns the staging buffers and the newest step's samples.

    Used by the step loop's thread only.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KvCache,
        controls: ControlSender,
        tenants: TenantSlots | None = None,
        *,
        num_mask_words: int = 0,
        kv_sender: KvSender | None = None,
        adapters: Mapping[str, int] | None = None,
        cutting: StepSplit = WHOLE,
        image_cache_bytes: int = 0,
    ) -> None:
        """Create the runner.

        `tenants` assigns the tokens of the expert counts to tenants; None where experts are not counted.
        `num_mask_words` follows from the grammars' tokenizer; 0 where no row has a grammar. `kv_sender` sends KV to
        other engines. `adapters` maps loaded adapters to their slots. `cutting` sets how steps are split into
        micro-batches. `image_cache_bytes` is the budget of the cache of encoded images.
        """
        self._kv_sender, self._cutting = kv_sender, cutting
        self._model, self._kv, self._controls = model, kv, controls
        self.staging = Staging(model.device, controls.steps_in_flight)
        apart = model.arithmetic.invariant
        self.features = features_of(model, image_cache_bytes)
        self._builder = BatchBuilder(
            kv.block_size,
            model.device,
            self.staging,
            answers_apart=apart,
            tenants=tenants,
            adapters=adapters,
            features=self.features,
            num_tables=kv.num_groups,
            num_record_tokens=kv.num_record_tokens if model.spec.recurrent_layers else None,
        )
        self._sampler = Sampler(model.spec.vocab_size, model.device, self.staging)
        self._masks = MaskMaker(num_mask_words, model.spec.vocab_size, model.device)
        self._num_groups, self._num_copies = model.ranks.num_cache_groups, model.ranks.copies.size
        self._expert_counter = None if tenants is None else model.expert_counter
        self._newest: InFlightStep | None = None
        self._sampled: Drawn | Best | None = None  # sampled by the newest step
        self.graphs: DecodeGraphs | None = None

    @property
    def sampled_L(self) -> Tensor | None:  # noqa: N802
        """Tokens sampled by the newest step, on the device."""
        return None if self._sampled is None else self._sampled.token_L

    def launch(self, plan: Plan) -> InFlightStep | PipelinedStep:
        """Queue the step. A pending token of its sequences is one that the previously launched step samples.

        In a pipeline no sequence has a pending token.
        """
        self.staging.begin_step()
        if self.features is not None:
            self._encode_images(plan, self.features)
        if self._num_groups == self._num_copies == 1:
            hosts, order_L = [self._builder.arrange(plan)], _IN_ORDER
        else:
            hosts, order_L = self._arrange(plan)
        rows = rows_of(plan)
        if self._controls.steps_in_flight > 1:
            return self._begin(plan, hosts, order_L, rows)
        best = self._best(hosts, rows)
        if best is None:
            self._newest = self._launch(plan, hosts, order_L, rows)
        else:
            self._sampled = best
            self._newest = InFlightStep(plan, best, None, None, PASSED, [], self._experts_of(plan, hosts))
        return self._newest

    def _experts_of(self, plan: Plan, hosts: list[HostBatch]) -> StepExperts | None:
        """Return the experts that the chunks of the step used, after a mark; None where they are not counted."""
        if self._expert_counter is None:
            return None
        return self._counted(plan, None if self._model.expert_cache is None else self._moved_by(plan, hosts))

    def _counted(self, plan: Plan, moved_P: np.ndarray | None) -> StepExperts | None:
        """Return the experts of the newest counted pass; None where they are not counted."""
        if self._expert_counter is None:
            return None
        experts = self._expert_counter.take_step(len(plan.chunks), self.staging.download)
        return experts if moved_P is None else replace(experts, moved_P=moved_P)

    def _moved_by(self, plan: Plan, hosts: list[HostBatch]) -> np.ndarray | None:
        """Return the bytes of experts that this rank loaded for each chunk in the newest pass; None if none."""
        cache = self._model.expert_cache
        loaded_T = None if cache is None else cache.traffic.shares.take()
        owner_T = hosts[0].owner_T
        if loaded_T is None or owner_T is None or len(loaded_T) != len(owner_T):  # with ranks that exchange tokens
            return None
        return bytes_of_chunks(owner_T, loaded_T, len(plan.chunks))

    def _encode_images(self, plan: Plan, features: FeatureCache) -> None:
        """Encode the images of the step that are not encoded yet, on all ranks."""
        for chunk in plan.chunks[plan.num_decode :]:  # output tokens stand for no image
            images, first = chunk.sequence.request.images, chunk.sequence.kv.num_computed
            for part in () if images is None else images.parts(first, first + chunk.num_tokens):
                if features.lacks(part.key):
                    self._controls.send(EncodeImage(part.key, part.image))
                    features.encode(part.key, part.image)
                elif not part.first:
                    features.hits_total += 1

    def forget_images(self, marks: frozenset[bytes]) -> int:
        """Drop the encoded images of the tenants with these marks, on all ranks; return how many they were."""
        if self.features is None or not marks:
            return 0
        self._controls.send(ForgetImages(sorted(marks)))
        return self.features.forget(marks)

    def _best(self, hosts: list[HostBatch], rows: list[Row]) -> Best | None:
        """Run a step of plain greedy decodes without torch, and return the most likely tokens.

        Most steps on a CPU are of this kind. A torch call takes 50 µs or more when the step's weights have just passed
        through the CPU caches. Returns None for other steps, without having computed anything.
        """
        if self._kv_sender is not None or not (all(map(is_greedy, rows)) or all(map(is_plain, rows))):
            return None
        made = self._decode(hosts, with_logits=True)
        return None if made is None or made.logits is None else Best.of(made.logits)

    def _decode(self, hosts: list[HostBatch], *, with_logits: bool) -> Replayed | None:
        """Run a decode step that the model can replay as a whole.

        Returns None for other steps, without computing anything.
        """
        if len(hosts) > 1 or not hosts[0].decodes_only or len(hosts[0].pending_rows_P):
            return None
        return self._model.decode(hosts[0], self._kv, with_logits=with_logits)

    @torch.inference_mode()
    def _launch(self, plan: Plan, hosts: list[HostBatch], order_L: np.ndarray, rows: list[Row]) -> InFlightStep:
        with one_torch_thread() if self._model.only_kernels else contextlib.nullcontext():
            return self._compute(plan, hosts, order_L, rows)

    def _compute(self, plan: Plan, hosts: list[HostBatch], order_L: np.ndarray, rows: list[Row]) -> InFlightStep:
        before_L = self.sampled_L
        masks = self._masks.begin(rows, self._newest)
        sends = [] if self._kv_sender is None else self._kv_sender.of(plan, self._kv)
        num_micro_batches = 1 if sends else self._cutting.count(hosts)  # KV is sent once a layer has stored all rows
        self._controls.step(hosts, order_L, len(rows), num_micro_batches, sends)
        leaving = None if self._kv_sender is None else self._kv_sender.own.sends(sends, self._kv)
        made = None if leaving is not None else self._decode(hosts, with_logits=False)
        logits_LV: Tensor | None = None
        if made is not None:
            hidden_LD, logits_LV = made.hidden_TD, made.logits_SV
        elif self.graphs is not None and leaving is None and self.graphs.takes(hosts[0]):
            hidden_LD = self.graphs.run(hosts[0], before_L)
        else:
            batch = self._upload(hosts, order_L, before_L, num_micro_batches)
            hidden_LD = self._model.hidden(batch, self._kv, leaving)
        if logits_LV is None:
            logits_LV = self._model.logits(hidden_LD[: len(rows)])
        drawn = self._sampler.sample(logits_LV, rows, before_L, None if masks is None else masks.wait())
        self._sampled = drawn
        self._controls.send_tokens(drawn.token_L)
        num_scored = sum([host.num_scored for host in hosts])
        unit_ED, scores = self._results(hidden_LD, len(rows), num_scored, scored(plan) if num_scored else [])
        invalid_rows = [] if masks is None else masks.problems
        results = drawn.download(self.staging), unit_ED, scores
        experts = self._experts_of(plan, hosts)
        return InFlightStep(plan, *results, self.staging.mark(), invalid_rows, experts)

    @torch.inference_mode()
    def _begin(self, plan: Plan, hosts: list[HostBatch], order_L: np.ndarray, rows: list[Row]) -> PipelinedStep:
        """Run the first stage of a pipeline, while later stages may still compute earlier steps."""
        masks = self._masks.begin(rows, None)
        sends = [] if self._kv_sender is None else self._kv_sender.of(plan, self._kv)
        self._controls.step(hosts, order_L, len(rows), 1, sends)
        leaving = None if self._kv_sender is None else self._kv_sender.own.sends(sends, self._kv)
        begun = self._model.begin_pass(self._upload(hosts, order_L, None, 1), self._kv, leaving)
        num_scored = sum([host.num_scored for host in hosts])
        allowed, problems = (None, []) if masks is None else (masks.wait(), masks.problems)
        rows, moved_P = rows_of(plan, as_launched=True), self._moved_by(plan, hosts)
        return PipelinedStep(
            plan, rows, begun, num_scored, scored(plan) if num_scored else [], allowed, problems, moved_P
        )

    @torch.inference_mode()
    def _end(self, step: PipelinedStep) -> InFlightStep:
        """Receive the last stage's result of the oldest step in the pipeline, and sample."""
        self._controls.end_step()
        hidden_LD = self._model.end_pass(step.begun)
        logits_LV = self._model.logits(hidden_LD[: len(step.rows)])
        drawn = self._sampler.sample(logits_LV, step.rows, None, step.allowed)
        unit_ED, scores = self._results(hidden_LD, len(step.rows), step.num_scored, step.scored)
        results = drawn.download(self.staging), unit_ED, scores
        experts = self._counted(step.plan, step.moved_P)
        return InFlightStep(step.plan, *results, self.staging.mark(), step.invalid_rows, experts)

    def _upload(self, hosts: list[HostBatch], order_L: np.ndarray, before_L: Tensor | None, num_parts: int) -> Batch:
        """Return the first group's batch on the device, in `num_parts` micro-batches."""
        spread = spread_of(hosts, self.staging.upload(order_L)) if len(hosts) > 1 else None
        rank_slots = rank_slots_of(hosts) if self._num_copies > 1 else ()
        batch = self._builder.upload(hosts[0], before_L, spread, cut(hosts[0], num_parts), rank_slots)
        if self.features is not None:
            self.features.end_step(part for host in hosts if host.images is not None for part in host.images.parts)
        return batch

    def _results(
        self, hidden_LD: Tensor, num_sampled: int, num_scored: int, of_prompts: list[Scored]
    ) -> tuple[Tensor | None, Scores | None]:
        """Return the vectors of the rows that embed, and the log-probabilities of prompts, if there are any."""
        unit_ED, scores, end = None, None, len(hidden_LD) - num_scored
        if end > num_sampled:
            unit_ED = self.staging.download(unit_vectors(hidden_LD[num_sampled:end]))
        if num_scored:
            scores = score(self._model, hidden_LD[end:], of_prompts, self.staging)
        return unit_ED, scores

    def _arrange(self, plan: Plan) -> tuple[list[HostBatch], np.ndarray]:
        """Return the step's batch of each of several rank groups, and the order of their wanted rows in the step."""
        if self._num_copies > 1:
            return divide_tokens(self._builder.arrange(plan), self._num_copies)
        hosts = with_adapter_rows(self._builder.arrange_groups(plan, self._num_groups))
        return hosts, order_of(plan, hosts)

    def collect(self, flight: InFlightStep | PipelinedStep) -> StepResults:
        """Wait for the results of the oldest launched step and return them."""
        if isinstance(flight, PipelinedStep):
            flight = self._end(flight)
        flight.done.wait()
        token_ids, logprobs = flight.drawn.unpack()
        vectors = [] if flight.unit_ED is None else as_bytes(flight.unit_ED)
        scores = [] if flight.scores is None else flight.scores.unpack()
        bad_scores = frozenset(key for key, one in scores if not are_finite(one)) if scores else _NO_KEYS
        non_finite = flight.drawn.non_finite_rows()
        return StepResults(token_ids, logprobs, vectors, scores, non_finite, bad_scores, flight.experts)


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute on the calling thread only.

    Torch's other threads spin for some milliseconds after each operation, on the cores that our kernels' threads need
    next.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
