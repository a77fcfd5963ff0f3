"""Messages between the engine server and its core (msgpack over a ZeroMQ PAIR socket on ipc).

The server names requests by an integer `key` that it never reuses, so that two gateways may use the same request id. A
batch of commands or of outputs is one frame: `list[ToCore]` in one direction, one `CoreStep` per step in the other.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_engine.images.prompt_images import PromptImage
from moiety_wire.classes import ServiceClass
from moiety_wire.engine_load import LoadMetrics
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery, ScaleExpertRanks
from moiety_wire.fleet_service import ReplicaService, ServiceReport
from moiety_wire.grammars import GrammarSpec
from moiety_wire.images import ImageRules
from moiety_wire.messages import FailureCode, FinishReason, Sampling, SpeculativePrefillRequest
from moiety_wire.roles import KvHandoff, KvRanks, KvTransferTimes
from moiety_wire.thought_budget import ThoughtBudget
from moiety_wire.trace_events import EventKind, Reason, StepNote


class CoreSubmit(msgspec.Struct, frozen=True, gc=False, tag="submit"):
    """A request, validated by the server. The server matches stop strings itself."""

    key: int
    tenant_id: str
    service: ServiceClass
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int  # output tokens; those beyond the context are not generated
    min_tokens: int
    stop_token_ids: list[int]  # end-of-sequence ids included unless ignore_eos
    credit_tokens: int
    cache_salt: bytes
    arrival_unix_ns: int
    deadline_unix_ns: int | None = None
    tenant_weight: float = 1.0
    fallback: ServiceClass | None = None  # class after a downgrade, where `service` downgrades on overload
    resumed_ids: list[int] | None = None  # output of another engine, which had admitted it; fewer than max_tokens
    embed: bool = False  # ends with its prefill; `max_tokens` is 0
    second_segment_at: int = 0  # first token of the second text of a pair; 0: one text
    sibling_tokens: int = 0  # prompt tokens besides its own that the SLO allows time for
    grammar: GrammarSpec | None = None  # grammar of its answer
    hand_over: KvHandoff | None = None  # target of its KV; it ends with its next token, unless that was its last
    transfer_id: str = ""  # id of the incoming KV transfer
    adapter: str = ""  # "": the base model
    speculative_prefill: SpeculativePrefillRequest | None = (
        None  # ends without output, once its prompt is computed or dropped
    )
    keep_s: float = 0.0  # time in which its prefix-cache blocks are evicted after others
    thought_budget: ThoughtBudget | None = None
    images: tuple[PromptImage, ...] = ()  # in the order of their places in the prompt
    images_pending: bool = False  # they follow in CoreImages


class CoreImages(msgspec.Struct, frozen=True, tag="images"):
    """The decoded images of a request that waits for them."""

    key: int
    images: tuple[PromptImage, ...]


class CoreExtend(msgspec.Struct, frozen=True, tag="extend"):
    key: int
    credit_tokens: int
    last: bool


class CoreAbort(msgspec.Struct, frozen=True, tag="abort"):
    """End the request before the next step; answered by an output with `finish` unless it had already ended.

    `reason` stop: the server found a stop string; abort: the client or gateway disconnected.
    """

    key: int
    reason: FinishReason


class CoreShutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class CoreSleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Free the device's memory, while no request is open, or allocate it again. Answered by CoreSlept."""

    asleep: bool


class CoreAdapter(msgspec.Struct, frozen=True, tag="adapter"):
    """Register an adapter of this name, in a folder that remains while requests use it."""

    name: str
    folder: str


class CoreForget(msgspec.Struct, frozen=True, tag="forget"):
    """Delete these tenants' cached KV on every tier, and cache none of it from now on."""

    tenant_ids: list[str]


class CoreFleetService(msgspec.Struct, frozen=True, tag="fleet_service"):
    """Service of tenants on other replicas of the model, as a gateway sent it."""

    replicas: list[ReplicaService]


ToCore = (
    CoreSubmit
    | CoreImages
    | CoreExtend
    | CoreAbort
    | CoreShutdown
    | CoreSleep
    | CoreAdapter
    | CoreForget
    | CoreFleetService
    | ExpertLoadQuery
    | ScaleExpertRanks
)


class CoreLogprob(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0  # among all tokens, 1 for the most likely one; 0: not computed


class CoreEvent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A decision about a request; `other` is the key of the request that benefited, 0 if none."""

    unix_ns: int
    kind: EventKind
    reason: Reason
    other: int = 0


class CoreAdmission(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler's decision to serve a request."""

    key: int
    served_class: str
    reason: Reason
    predicted_ttft_s: float | None


class CoreFinish(msgspec.Struct, frozen=True, array_like=True):
    reason: FinishReason
    detail: str
    num_cached_tokens: int
    num_output_tokens: int
    scheduled_unix_ns: int
    first_token_unix_ns: int
    finished_unix_ns: int
    served_class: str
    events: tuple[CoreEvent, ...]
    num_recomputed_tokens: int
    embedding: bytes = b""  # a vector or a head's logits, little-endian float32
    num_drafted_tokens: int = 0  # drafted and computed
    num_accepted_tokens: int = 0  # drafted tokens that were accepted
    arrival: KvTransferTimes | None = None
    num_speculative_tokens: int = 0
    expert_read_bytes: int = 0
    expert_moved_bytes: int = 0
    expert_profile: bytes = b""  # as in Finished


class CoreScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the prompt's tokens from `position` on. A part may repeat after a preemption."""

    position: int
    logprobs: list[CoreLogprob]


class CoreOutput(msgspec.Struct, frozen=True, array_like=True):
    """Output of one step for one request: new tokens, and possibly its end.

    The first output reports how much of the prompt was in the prefix cache.
    """

    key: int
    token_ids: list[int]
    logprobs: list[CoreLogprob] | None = None
    finish: CoreFinish | None = None
    num_cached_tokens: int = 0
    scores: CoreScores | None = None  # in a separate output


class CoreFailure(msgspec.Struct, frozen=True, array_like=True):
    key: int
    code: FailureCode
    message: str
    num_output_tokens: int = 0
    reason: Reason | None = None
    retry_after_s: float | None = None
    in_first_step: bool | None = None  # as in Failed
    expert_read_bytes: int = 0
    expert_moved_bytes: int = 0


class CoreLoad(LoadMetrics, frozen=True, array_like=True):
    """LoadMetrics of the core, updated some times per second; an array without field names, since there are many."""

    tenant_service: ServiceReport | None = None  # None: there is no newer report than the last one


class CoreState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    REFUSED = "refused"  # `message` contains the reason; the core ends


class CoreHello(msgspec.Struct, frozen=True, tag="hello"):
    """Progress of the core while it loads, and finally the data for the model card."""

    state: CoreState
    message: str = ""
    family: str = ""
    max_context_tokens: int = 0
    vocab_size: int = 0
    max_num_logprobs: int = 0
    dtype: str = ""
    device: str = ""
    embedding_width: int = 0  # 0: this core computes no embeddings
    unit_vectors: bool = True  # embeddings are divided by their length
    generates: bool = True
    labels: tuple[str, ...] = ()
    score_activation: str = ""
    follows_grammars: bool = False
    hands_over: bool = False
    kv_address: str = ""  # address for KV from other engines
    kv_host: str = ""
    kv_secret: str = ""
    kv_ranks: KvRanks = KvRanks()
    takes_adapters: bool = False
    speculative_prefill: bool = False
    exchanges_service: bool = False
    publishes_prefixes: bool = False  # the core sends `PrefixChanges`
    images: ImageRules | None = None  # None: this model takes no images
    serves_spot: bool = False
    model_digest: str = ""  # fingerprint of the checkpoint
    layout: str = ""
    batch_invariant: bool = False


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """A traced step, and the keys of its requests; the server knows their classes."""

    step: StepNote
    keys: list[int]


class CoreStep(msgspec.Struct, frozen=True, tag="step"):
    """Outputs of one step. `load`: None where the previous load is still valid, since no request came or ended."""

    outputs: list[CoreOutput]
    failures: list[CoreFailure]
    load: CoreLoad | None
    admissions: list[CoreAdmission] = []
    traced: list[TracedStep] = []


class CoreSlept(msgspec.Struct, frozen=True, tag="slept"):
    """Answer to CoreSleep: whether the core sleeps now. `problem`: why it did not follow the command."""

    asleep: bool
    problem: str = ""


class PrefixChanges(msgspec.Struct, frozen=True, tag="prefix_changes"):
    """Names of blocks that the prefix cache has stored and evicted, in 8 bytes each; none is in both."""

    stored: bytes
    evicted: bytes


ToServer = CoreHello | CoreStep | CoreSlept | ExpertLoad | ExpertBalance | PrefixChanges
