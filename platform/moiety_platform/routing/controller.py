"""`/admin/v1/engines`: the replicas for administrators. The admin router authenticates."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from moiety_platform.access.actions import needs
from moiety_platform.access.views import READ_ENGINES, SCALE_ENGINES, SLEEP_ENGINES
from moiety_platform.audit.trail import AuditedStore, Change, note
from moiety_platform.engine_client.base import EngineState
from moiety_platform.openapi.described import fails
from moiety_platform.routing.circuit_breaker import BreakerState, ReplicaBreakers
from moiety_platform.routing.replicas import Replicas
from moiety_wire.engine_load import ClassLoad, Load, SleepState, StepCosts
from moiety_wire.roles import EngineRole
from moiety_wire.shared_fields import CopyOf, copy_fields


class CardView(msgspec.Struct, frozen=True):
    """An engine's description of its model."""

    engine_id: str
    model: str
    family: str
    dtype: str
    device: str
    max_context_tokens: int
    vocab_size: int
    embedding_width: int
    created_unix_s: int
    role: EngineRole


class ClassLoadView(CopyOf[ClassLoad], msgspec.Struct, frozen=True):
    """State of one class in an engine, and its decisions since the engine's start, some by reason."""

    name: str
    num_waiting: int
    num_running: int
    predicted_ttft_s: float
    admitted_total: int
    rejected_total: dict[str, int]
    downgraded_total: int
    preempted_total: dict[str, int]
    demoted_total: int
    boosted_total: int
    recomputed_tokens_total: int
    oldest_waiting_unix_s: float


class LoadView(msgspec.Struct, frozen=True):
    """An engine's last heartbeat: its state, and its counters since its start."""

    engine_id: str
    seq: int
    num_running: int
    num_waiting: int
    num_paused: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    block_size: int
    steps_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    requests_total: int
    draining: bool
    host_blocks_total: int
    host_blocks_used: int
    swapped_out_blocks_total: int
    swapped_in_blocks_total: int
    attention_waited_seconds_total: float
    experts_waited_seconds_total: float
    running_for_s: float
    tokens_past_stop_total: int
    sleep: SleepState
    sleep_problem: str
    unacknowledged_replicas: list[str]
    drafted_tokens_total: int
    accepted_tokens_total: int
    max_batch_tokens: int
    max_running: int
    step_costs: StepCosts | None
    prefill_done_requests_total: int
    disaggregated_decode_requests_total: int
    lost_transfers_total: int
    speculative_tokens_total: int
    speculative_used_tokens_total: int
    speculative_wasted_tokens_total: int
    kv_blocks_kept: int
    host_hit_blocks_total: int
    disk_bytes_total: int
    disk_bytes_used: int
    disk_blocks_cached: int
    disk_written_blocks_total: int
    disk_written_bytes_total: int
    disk_dropped_blocks_total: int
    disk_failed_writes_total: int
    disk_restored_blocks_total: int
    disk_restored_bytes_total: int
    disk_waited_requests_total: int
    disk_passed_over_requests_total: int
    disk_lost_files_total: int
    expert_slots: int
    expert_hits_total: int
    expert_misses_total: int
    prefetched_experts_total: int
    prefetched_expert_hits_total: int
    expert_loaded_bytes_total: int
    expert_read_bytes_total: int
    charged_expert_read_bytes_total: int
    charged_expert_moved_bytes_total: int
    rebalances_total: int
    moved_expert_bytes_total: int
    failed_expert_moves_total: int
    rank_balancedness: float
    rank_balancedness_planned: float
    excluded_ranks: int
    expert_ranks: int
    can_change_expert_ranks: bool
    requested_expert_ranks: int
    expert_ranks_problem: str
    expert_rank_changes_total: int
    failed_expert_rank_changes_total: int
    expert_rank_switch_seconds_total: float
    fleet_replicas: int
    remote_service_total: float
    prefill_seconds_total: float
    decode_seconds_total: float
    grammars_waiting: int
    grammar_compile_seconds_total: float
    grammar_worker_restarts_total: int
    images_waiting: int
    images_waiting_bytes: int
    decoded_image_bytes: int
    decoded_image_hits_total: int
    decoded_image_misses_total: int
    decoded_image_evictions_total: int
    decoded_images_total: int
    refused_images_total: int
    failed_image_decodes_total: int
    expired_image_waits_total: int
    image_decode_seconds_total: float
    image_cache_bytes_total: int
    image_cache_bytes_used: int
    image_cache_hits_total: int
    image_cache_misses_total: int
    image_cache_evictions_total: int
    encoded_image_tokens_total: int
    image_encode_seconds_total: float
    tenant_kv_blocks: dict[str, int]
    pending_prefill_tokens: int
    classes: list[ClassLoadView]

    @classmethod
    def of(cls, load: Load) -> LoadView:
        return copy_fields(load, cls, classes=[ClassLoadView.of(one) for one in load.classes])


_NOT_SHOWN = {
    "tenant_service",  # for the exchange between engines; it changes with every step
    "active_experts",  # for routing
}
assert set(LoadView.__struct_fields__) == set(Load.__struct_fields__) - _NOT_SHOWN, "the rest is shown"
assert set(ClassLoadView.__struct_fields__) == set(ClassLoad.__struct_fields__)


class EngineView(msgspec.Struct, frozen=True):
    """An engine and its state.

    `reason` says why it is not healthy; `num_inflight` are the requests of this gateway, `circuit` is its circuit
    breaker: an engine whose breaker is open is the last choice for new requests. The card is the last known one, the
    load the engine's last heartbeat.
    """

    address: str
    healthy: bool
    draining: bool
    reason: str
    num_inflight: int
    circuit: BreakerState
    card: CardView | None
    load: LoadView | None


class EngineViews(msgspec.Struct, frozen=True):
    """All engines."""

    data: list[EngineView]


class NewExpertRanks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of ranks that are to hold the experts of an engine."""

    num_ranks: Annotated[int, msgspec.Meta(ge=0, le=4096)]


class EngineController(Controller):
    """Routes of engines."""

    path = "/engines"
    tags = ("engines",)

    @get(opt=needs(READ_ENGINES))
    async def list_engines(self, replicas: NamedDependency[Replicas]) -> EngineViews:
        """List all engines and their states."""
        return EngineViews([_describe(state, replicas.breakers) for state in replicas.states()])

    @post("/{engine_id:str}/sleep", status_code=202, opt=needs(SLEEP_ENGINES) | fails(404, 409, 503))
    async def sleep_engine(
        self, replicas: NamedDependency[Replicas], store: NamedDependency[AuditedStore], engine_id: FromPath[str]
    ) -> EngineView:
        """Put an engine to sleep: it frees its device's memory once its open requests have ended.

        It takes no new requests: they go to other engines of the model, or get 503. `load.sleep` shows the progress.
        """
        return await _change_sleep(replicas, store, engine_id, asleep=True)

    @post("/{engine_id:str}/wake", status_code=202, opt=needs(SLEEP_ENGINES) | fails(404, 409, 503))
    async def wake_engine(
        self, replicas: NamedDependency[Replicas], store: NamedDependency[AuditedStore], engine_id: FromPath[str]
    ) -> EngineView:
        """Wake a sleeping engine, which loads its weights again. `load.sleep` shows the progress."""
        return await _change_sleep(replicas, store, engine_id, asleep=False)

    @post("/{engine_id:str}/expert-ranks", status_code=202, opt=needs(SCALE_ENGINES) | fails(400, 404, 409, 503))
    async def scale_expert_ranks(
        self,
        replicas: NamedDependency[Replicas],
        store: NamedDependency[AuditedStore],
        engine_id: FromPath[str],
        data: JSONBody[NewExpertRanks],
    ) -> EngineView:
        """Change the number of ranks that hold experts only (`--ffn-ranks`), while the engine serves.

        `load.expert_ranks` is the number; `load.requested_expert_ranks` differs from it while the engine changes it.
        `load.expert_ranks_problem` is the reason if the engine could not.
        """
        async with store.write() as session:
            before = replicas.scale_expert_ranks(engine_id, data.num_ranks)
            ranks = 0 if before.load is None else before.load.expert_ranks
            change = {"requested_expert_ranks": data.num_ranks}
            note(session, Change("change", "engines", engine_id, {"expert_ranks": ranks}, change))
        return _describe(before, replicas.breakers)


async def _change_sleep(replicas: Replicas, store: AuditedStore, engine_id: str, *, asleep: bool) -> EngineView:
    async with store.write() as session:
        before = replicas.set_asleep(engine_id, asleep=asleep)
        note(
            session,
            Change("change", "engines", engine_id, {"sleep": before.sleep.value}, {"asked_to_sleep": asleep}),
        )
    return _describe(before, replicas.breakers)


def _describe(state: EngineState, breakers: ReplicaBreakers) -> EngineView:
    card = state.card
    return copy_fields(
        state,
        EngineView,
        circuit=breakers.state(state.address),
        card=None if card is None else copy_fields(card, CardView),
        load=None if state.load is None else LoadView.of(state.load),
    )
