"""The messages of the wire, grouped by receiver.

Transport: the gateway connects a ZeroMQ DEALER socket (its identity names the gateway process) to the engine front's
ROUTER; each message is one frame of msgpack. A gateway says `Hello` and is answered by a `ModelCard`; it then sends
`Heartbeat` every HEARTBEAT_INTERVAL_S, and the engine sends `Load` at the same pace. A side that hears nothing for
SILENCE_LIMIT_S takes the other for dead: the engine aborts that gateway's requests, the gateway fails over.

A request's life: `Submit` → `Accepted` → `Tokens`* → exactly one `Finished` or `Failed`; a request that the scheduler
turns away goes from `Submit` to `Failed(overloaded)` without having been accepted. `Tokens.position` counts
output tokens from 0 without gap or repeat, so a receiver can prove that it missed nothing. `seq` counts the messages
of one request in one direction from 0. Credit is the *total* number of output tokens the engine may emit for the
request; `Extend` raises it (being a total, a repeated message does no harm). At the end of its credit a request pauses
in place.

An embedding (`Submit.embed`) generates nothing: it needs no credit, and its `Finished`, before which no `Tokens` come,
brings the vector.

A request whose engine was lost is submitted to another one with `resumed_ids`, the output that its gateway has. All
counts of that request go on being totals: the first `position` is the number of resumed tokens, credit, max_tokens,
min_tokens and `num_output_tokens` count them, penalties and stop strings see them. An embedding that was admitted has
no output to resume, and says so by an empty list.

An engine remembers what each ended request used until a gateway says `UsageAcknowledgement`, which it does once that
is stored. What
a gateway leaves behind when it dies, the engine tells another by `UnacknowledgedUsage`, again and again until it is
settled too.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_wire.classes import ServiceClass
from moiety_wire.experts import AskExperts, ExpertBalance, ExpertLoad
from moiety_wire.figures import Load
from moiety_wire.grammars import GrammarSpec
from moiety_wire.notes import Event, Phases, Reason
from moiety_wire.roles import EngineRole, KvHandoff, KvTransferTimes

PROTOCOL_VERSION = 5
HEARTBEAT_INTERVAL_S = 0.5
SILENCE_LIMIT_S = 5.0


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens, the model's context, or a refused credit (see Finished.detail)
    ABORT = "abort"  # the gateway asked for it, or went silent
    CONTENT_FILTER = "content_filter"  # an external engine's filter cut the answer; engines of ours have none
    PREFILL_DONE = "prefill_done"  # another engine is to go on with it: see `Submit.hand_over`


class FailureCode(StrEnum):
    """Stable codes of `Failed`; the gateway maps them to HTTP."""

    UNKNOWN_MODEL = "unknown_model"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    GUIDE_REFUSED = "guide_refused"  # what the answer is to be cannot be followed
    ADAPTER_MISSING = "adapter_missing"  # the engine does not have it, or not any more: send it, and submit again
    ADAPTER_REFUSED = "adapter_refused"  # it cannot be served beside this model
    NON_FINITE = "non_finite_output"  # its logits or vector held NaN or infinity
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ENGINE_FAILED = "engine_failed"


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    num_logprobs: int | None = None  # None: no logprobs; N: the chosen token's, and the N best
    num_prompt_logprobs: int | None = None  # likewise of the prompt's tokens, which no cache is asked for then


class ThoughtMarks(msgspec.Struct, frozen=True):
    """The marks around the thought that an answer may begin with. `is_open`: the prompt has opened it."""

    opener: str
    closer: str
    is_open: bool


class Stopping(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a request ends. `max_tokens` counts output tokens; stop strings are matched by the engine's front, and not
    within a thought."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    thought: ThoughtMarks | None = None  # None: the answer has no thought that stop strings pass over


class SpeculativePrefillRequest(msgspec.Struct, frozen=True):
    """A prompt that is likely to come, or begins as one: its KV is computed while nothing else is to be done, and kept
    as a prefix. Nobody is answered with anything.

    The request after which it is foreseen had the prompt's first `num_shared` tokens and then `other_ids`, of all of
    which `num_asked` were its own prompt: what the cache has of it beyond what is shared gives way first."""

    habit: str  # whose conversations go on alike, as far as is known: the likelihood is learned of each
    num_shared: int = 0
    other_ids: list[int] = []
    num_asked: int = 0


# ── to the engine ────────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A gateway presents itself; the answer is a ModelCard. `replica_id` names its process, whatever connections it
    makes: what it leaves unacknowledged is told under that name."""

    gateway_id: str
    protocol_version: int = PROTOCOL_VERSION
    replica_id: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The gateway is alive, although it may have nothing to say."""

    seq: int


class Submit(msgspec.Struct, frozen=True, omit_defaults=True, tag="submit"):
    """Generate for one prompt, or embed it. `request_id` is unique within its gateway."""

    request_id: str
    seq: int
    model: str
    tenant_id: str
    service: ServiceClass
    prompt_ids: list[int]
    sampling: Sampling
    stopping: Stopping
    credit_tokens: int
    cache_salt: bytes  # starts the prefix-cache hash chain: of a tenant, the same bytes share a cache
    arrival_unix_ns: int
    deadline_unix_ns: int | None = None
    tenant_weight: float = 1.0
    fallback: ServiceClass | None = None  # the class to be served in where `service` says downgrade at overload
    traceparent: str = ""  # W3C trace context
    resumed_ids: list[int] | None = None  # the output so far of a request that another engine had admitted
    bill: bytes = b""  # whom to charge and at what price, in the gateway's own words; comes back in MeteredUsage
    embed: bool = False  # the prompt's vector is wanted, and no token: `max_tokens` and `credit_tokens` are 0
    gathers: bool = False  # nobody reads along: after the first, tokens may come some at a time
    sibling_tokens: int = 0  # of the client's other prompts in the same request, for which its promise allows time too
    shown_ids: tuple[int, ...] = ()  # special tokens that have a text in this answer: those that mark calls of tools
    guide: GrammarSpec | None = None  # what the answer must be
    hand_over: KvHandoff | None = None  # after its first token it is to end here, and its KV to go elsewhere
    transfer_id: str = ""  # under which its KV comes from the engine that has computed it
    adapter: str = ""  # the id of one that the engine was sent or started with; "": the model as it is
    speculative_prefill: SpeculativePrefillRequest | None = (
        None  # only to an engine whose card says so; `max_tokens` and `credit_tokens` are 0
    )
    keep_s: float = 0.0  # the conversation will come back within so long: what it leaves in the prefix cache is kept
    marker_ids: tuple[int, ...] = ()  # added tokens that mark calls or thoughts: text that spells one is guarded


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Raise a request's credit to `credit_tokens` in total. `last` says that no more will come: then the end of the
    credit ends the request with `length` and detail `credit_refused`."""

    request_id: str
    seq: int
    credit_tokens: int
    last: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request now and free what it holds; answered by Finished(abort) unless it had already ended."""

    request_id: str
    seq: int


class UsageAcknowledgement(msgspec.Struct, frozen=True, tag="settled"):
    """What these requests of that gateway process used is stored; the engine may forget it."""

    replica_id: str
    request_ids: list[str]


class SleepCommand(msgspec.Struct, frozen=True, tag="rest"):
    """Fall asleep once what is open has ended, or wake up. An engine asleep takes no requests, and its model no memory
    of the device. How far it is stands in the engine's loads."""

    asleep: bool


class AdapterPart(msgspec.Struct, frozen=True, tag="adapter_part"):
    """A part of an adapter's tensors, in their order; the first brings its configuration, as PEFT writes both. Once the
    last has come, requests may name it, until the engine says that it is missing."""

    adapter_id: str
    index: int
    data: bytes
    config: str = ""  # JSON
    is_last: bool = False
    tenant_id: str = ""  # whose it is


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """These tenants were erased: what their requests have left goes, from memory and from disks, and what still runs
    leaves nothing. Only to an engine whose card says that it forgets, and to each of them again whenever it is
    connected; so an engine may hear of those that it has forgotten already, or never had."""

    tenant_ids: list[str]


ToEngine = (
    Hello
    | Heartbeat
    | Submit
    | Extend
    | Abort
    | UsageAcknowledgement
    | SleepCommand
    | AskExperts
    | AdapterPart
    | Forget
)

# ── to the gateway ───────────────────────────────────────────────────────────────────────────────────────────────────


class ModelCard(msgspec.Struct, frozen=True, tag="card"):
    """All that a gateway must know of the model; so it needs no model files."""

    engine_id: str
    model: str
    family: str
    tokenizer_json: str  # Hugging Face tokenizer.json
    chat_template: str  # "" if the model has none
    special_tokens: dict[str, str]  # bos_token, eos_token … as the template names them
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int  # prompt + output
    vocab_size: int
    max_num_logprobs: int
    created_unix_s: int
    dtype: str
    device: str
    protocol_version: int = PROTOCOL_VERSION
    embedding_width: int = 0  # numbers of a vector; 0 where the engine makes none
    extensible: bool = True  # False: credit cannot be raised, nor does it remember what ended requests used
    follows_grammars: bool = False
    role: EngineRole = EngineRole.BOTH
    hands_over: bool = False  # it takes `Submit.hand_over`
    kv_address: str = ""  # where it takes KV from other engines; "" where it takes none
    kv_host: str = ""  # engines of one host share memory
    kv_secret: str = ""  # by which a gateway allows a transfer to it: see `transfer_token`
    takes_adapters: bool = False
    adapters: tuple[str, ...] = ()  # that its operator has given it
    speculative_prefill: bool = False  # it takes `Submit.speculative_prefill`
    forgets: bool = False  # it takes `Forget`


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True, tag="accepted"):
    """The scheduler has admitted the request and will answer it with Finished or Failed."""

    request_id: str
    seq: int
    served_class: str  # the fallback's name where the request was downgraded
    reason: Reason
    predicted_ttft_s: float | None = None


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: str  # the token's text; an incomplete code point shows as U+FFFD
    token_bytes: bytes
    logprob: float
    token_id: int = -1  # -1: an engine of others, which does not tell


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: str
    token_bytes: bytes
    logprob: float
    top: list[TopLogprob]
    token_id: int = -1  # -1: an engine of others, which does not tell
    num_chars: int = -1  # characters that it completes in the answer's text, 0 of one without text; -1: not told


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """Output tokens from `position` on, with the text that they complete (possibly none: the text of an unfinished code
    point, or of what may become a stop string, comes with a later message). The first ones say how much of the prompt
    the prefix cache held."""

    request_id: str
    seq: int
    position: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0


class Finished(msgspec.Struct, frozen=True, omit_defaults=True, tag="finished"):
    """The end of a request. `text` is what detokenization still held back. `num_output_tokens` are the billable output
    positions: all up to and including the one that ended the request. `steps` are StepNotes, packed since most of them
    are never read; of a request with a trace context only."""

    request_id: str
    seq: int
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    phases: Phases
    text: str = ""
    served_class: str = ""
    events: list[Event] = []
    num_recomputed_tokens: int = 0  # computed again after preemptions; metered, not billed
    detail: str = ""  # the stop string that matched; max_tokens, context, credit_refused; silent_gateway, draining;
    # of a request that is handed over, why its KV does not go along
    embedding: bytes = b""  # of `Submit.embed`, unless aborted: a unit vector, little-endian float32
    num_drafted_tokens: int = 0  # guessed and computed; nobody pays for a guess
    num_accepted_tokens: int = 0  # of them, those that came true
    steps: bytes = b""
    prompt_logprobs: list[TokenLogprob] | None = None  # where asked for: of each of its tokens but the first
    arrival: KvTransferTimes | None = None  # how its KV came from the engine that had computed it
    # Of `Submit.speculative_prefill`, tokens that were computed, and `detail` says how it ended; of any other
    # request, those of its cached ones that had been foreseen.
    num_speculative_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """The engine could not serve the request. `num_output_tokens` is what it had emitted."""

    request_id: str
    seq: int
    code: FailureCode
    message: str
    num_output_tokens: int = 0
    reason: Reason | None = None  # of `overloaded`
    retry_after_s: float | None = None  # when coming back is predicted to succeed
    # Of an engine whose core died: whether it was computing this request's first token then, and may have died of it.
    in_first_step: bool | None = None


class MeteredUsage(msgspec.Struct, frozen=True, array_like=True):
    """What one request used that its gateway has not settled. Tokens are counts as in Finished."""

    replica_id: str
    request_id: str
    bill: bytes  # as it came in Submit
    served_class: str
    num_cached_tokens: int
    num_output_tokens: int


class UnacknowledgedUsage(msgspec.Struct, frozen=True, tag="unacknowledged"):
    """What gateways that are gone have left behind, for the receiver to store and then to settle."""

    engine_id: str
    records: list[MeteredUsage]


ToGateway = ModelCard | Accepted | Tokens | Finished | Failed | Load | UnacknowledgedUsage | ExpertLoad | ExpertBalance
