"""What the engine's front and its core say to each other (msgpack over a ZeroMQ PAIR socket on ipc).

The front names requests by an integer `key` that it never reuses, so that two gateways may use the same request id.
A batch of commands or of outputs travels as one frame: `list[ToCore]` one way, one `CoreStep` a step the other way.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_wire.classes import ServiceClass
from moiety_wire.experts import AskExperts, ExpertBalance, ExpertLoad
from moiety_wire.figures import Figures
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import FailureCode, FinishReason, Sampling, SpeculativePrefillRequest
from moiety_wire.notes import EventKind, Reason, StepNote
from moiety_wire.roles import KvHandoff, KvTransferTimes


class CoreSubmit(msgspec.Struct, frozen=True, tag="submit"):
    """A request, validated by the front. Stop strings stay with the front."""

    key: int
    tenant_id: str
    service: ServiceClass
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int  # output tokens; those beyond the context are not made
    min_tokens: int
    stop_token_ids: list[int]  # end-of-sequence ids included unless ignore_eos
    credit_tokens: int
    cache_salt: bytes
    arrival_unix_ns: int
    deadline_unix_ns: int | None = None
    tenant_weight: float = 1.0
    fallback: ServiceClass | None = None  # where `service` says downgrade at overload
    resumed_ids: list[int] | None = None  # output of another engine, which had admitted it; fewer than max_tokens
    embed: bool = False  # ends with its prefill; `max_tokens` is 0
    sibling_tokens: int = 0  # prompt tokens beside its own that the promise allows time for
    guide: GrammarSpec | None = None  # what its answer must be
    hand_over: KvHandoff | None = None  # where its KV goes; it ends with its next token, unless that was its last
    transfer_id: str = ""  # under which its KV comes
    adapter: str = ""  # "": the model as it is
    speculative_prefill: SpeculativePrefillRequest | None = (
        None  # ends without output, when its prompt is computed or is not going to be
    )
    keep_s: float = 0.0  # for which what it leaves in the prefix cache is evicted after other things


class CoreExtend(msgspec.Struct, frozen=True, tag="extend"):
    key: int
    credit_tokens: int
    last: bool


class CoreAbort(msgspec.Struct, frozen=True, tag="abort"):
    """End the request before the next step; answered by an output with `finish` unless it had already ended.
    `reason` stop: the front found a stop string; abort: the client or gateway left."""

    key: int
    reason: FinishReason


class CoreShutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class CoreSleep(msgspec.Struct, frozen=True, tag="rest"):
    """Give the device's memory back, while no request is open, or take it again. Answered by CoreSlept."""

    asleep: bool


class CoreAdapter(msgspec.Struct, frozen=True, tag="adapter"):
    """From now on there is an adapter of this name, in a folder that stays while requests use it."""

    name: str
    folder: str


class CoreForget(msgspec.Struct, frozen=True, tag="forget"):
    """Nothing that these tenants have left in the cache is kept any more, whether it was or not."""

    tenant_ids: list[str]


ToCore = CoreSubmit | CoreExtend | CoreAbort | CoreShutdown | CoreSleep | CoreAdapter | CoreForget | AskExperts


class CoreLogprob(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class CoreEvent(msgspec.Struct, frozen=True, array_like=True):
    """A decision about a request; `other` is the key of the one that profited, 0 if none."""

    unix_ns: int
    kind: EventKind
    reason: Reason
    other: int = 0


class CoreAdmission(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler's word that a request will be served."""

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
    events: list[CoreEvent]
    num_recomputed_tokens: int
    embedding: bytes = b""  # a unit vector, little-endian float32
    num_drafted_tokens: int = 0  # guessed and computed
    num_accepted_tokens: int = 0  # of them, those that came true
    arrival: KvTransferTimes | None = None
    num_speculative_tokens: int = 0


class CoreScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the prompt's tokens from that one on. A part may come again, after a preemption."""

    position: int
    logprobs: list[CoreLogprob]


class CoreOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step brought for one request: new tokens, and possibly its end. With the first tokens comes how much of
    the prompt the prefix cache held."""

    key: int
    token_ids: list[int]
    logprobs: list[CoreLogprob] | None = None
    finish: CoreFinish | None = None
    num_cached_tokens: int = 0
    scores: CoreScores | None = None  # in an output of their own


class CoreFailure(msgspec.Struct, frozen=True, array_like=True):
    key: int
    code: FailureCode
    message: str
    num_output_tokens: int = 0
    reason: Reason | None = None
    retry_after_s: float | None = None
    in_first_step: bool | None = None  # as in Failed


class CoreLoad(Figures, frozen=True, array_like=True):
    """The core's figures, of which new ones come some times a second; without names, since these are many."""


class CoreState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    REFUSED = "refused"  # `message` says why; the core ends


class CoreHello(msgspec.Struct, frozen=True, tag="hello"):
    """The core's progress while it loads, and at last what the front puts on the model card."""

    state: CoreState
    message: str = ""
    family: str = ""
    max_context_tokens: int = 0
    vocab_size: int = 0
    max_num_logprobs: int = 0
    dtype: str = ""
    device: str = ""
    embedding_width: int = 0  # 0: this core makes no embeddings
    follows_grammars: bool = False
    hands_over: bool = False
    kv_address: str = ""  # where it takes KV from other engines
    kv_host: str = ""
    kv_secret: str = ""
    takes_adapters: bool = False
    speculative_prefill: bool = False


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that was looked at, and whose requests ran in it; the front knows their classes."""

    step: StepNote
    keys: list[int]


class CoreStep(msgspec.Struct, frozen=True, tag="step"):
    """`load`: None where the one that was told last may stand a moment longer, since nobody came or went."""

    outputs: list[CoreOutput]
    failures: list[CoreFailure]
    load: CoreLoad | None
    admissions: list[CoreAdmission] = []
    traced: list[TracedStep] = []


class CoreSlept(msgspec.Struct, frozen=True, tag="rested"):
    """Whether the core sleeps now. `problem`: why it does not do what it was told."""

    asleep: bool
    problem: str = ""


ToFront = CoreHello | CoreStep | CoreSlept | ExpertLoad | ExpertBalance
