"""Messages of the wire, grouped by receiver.

Transport: the gateway connects a ZeroMQ DEALER socket (its identity names the gateway process) to the engine server's
ROUTER; each message is one frame of msgpack. A gateway sends `Hello`, and the engine answers with a `ModelCard`. The
gateway then sends `Heartbeat` every HEARTBEAT_INTERVAL_S, half as often while it has no request there, and the engine
sends `Load` every HEARTBEAT_INTERVAL_S; to a gateway without a request there, only if it has changed, and in answer to
each heartbeat. A side that receives nothing for SILENCE_LIMIT_S considers the other dead: the engine aborts that
gateway's requests, the gateway fails over.

Lifecycle of a request: `Submit` → `Accepted` → `Tokens`* → exactly one `Finished` or `Failed`; a request that the
scheduler rejects goes from `Submit` to `Failed(overloaded)` without `Accepted`. `Tokens.position` counts output tokens
from 0 without gap or repeat, so a receiver can detect missing tokens. `seq` counts the messages of one request in one
direction from 0. Credit is the *total* number of output tokens that the engine may emit for the request; `Extend`
raises it (a repeated message is harmless, since it carries a total). At the end of its credit a request pauses.

An embedding request (`Submit.embed`) generates no tokens and needs no credit. Its `Finished` contains the vector, and
no `Tokens` come before it. An engine whose card has `labels` returns the logits of these in place of a unit vector.

A request whose engine was lost is submitted to another engine with `resumed_ids`, the output that its gateway has. All
counts of that request stay totals: the first `position` is the number of resumed tokens; credit, max_tokens, min_tokens
and `num_output_tokens` include them; penalties and stop strings see them. An embedding request that was admitted before
has no output to resume, and sends an empty list.

An engine remembers the usage of each ended request until a gateway sends `UsageAcknowledgement`, which it does once the
usage is stored. The engine sends the unacknowledged usage of a gateway that died to another gateway as
`UnacknowledgedUsage`, repeatedly until it is acknowledged.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_wire.classes import ServiceClass
from moiety_wire.engine_load import Load
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery, ScaleExpertRanks
from moiety_wire.fleet_service import FleetService
from moiety_wire.grammars import GrammarSpec
from moiety_wire.images import ImageAllowance, ImageInput, ImageRules
from moiety_wire.prefix_events import PrefixEvents, PrefixSubscription
from moiety_wire.roles import EngineRole, KvHandoff, KvRanks, KvTransferTimes
from moiety_wire.thought_budget import ThoughtBudget, ThoughtMarks
from moiety_wire.token_sampling import TokenSampling
from moiety_wire.trace_events import Event, Phases, Reason

PROTOCOL_VERSION = 10
HEARTBEAT_INTERVAL_S = 0.5
SILENCE_LIMIT_S = 5.0


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens, the model's context, or a refused credit (see Finished.detail)
    ABORT = "abort"  # the gateway requested it, or went silent
    CONTENT_FILTER = "content_filter"  # an external engine's filter cut the output; our engines have no filter
    PREFILL_DONE = "prefill_done"  # another engine continues the request: see `Submit.hand_over`


class FailureCode(StrEnum):
    """Stable error codes of `Failed`; the gateway maps them to HTTP statuses."""

    UNKNOWN_MODEL = "unknown_model"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    GRAMMAR_REFUSED = "grammar_refused"  # the grammar of the output cannot be compiled or followed
    ADAPTER_MISSING = "adapter_missing"  # the engine does not hold the adapter: send it, and submit again
    ADAPTER_REFUSED = "adapter_refused"  # the adapter cannot be served with this model
    IMAGE_REFUSED = "image_refused"  # an image cannot be decoded within the limits
    IMAGES_MISSING = "images_missing"  # the engine does not hold an image of a reference: submit again with the files
    NON_FINITE = "non_finite_output"  # the logits or the vector contained NaN or infinity
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ENGINE_FAILED = "engine_failed"


class TokenRules(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Restrictions of the output's tokens. A grammar comes before them, and allowed ids before banned runs."""

    allowed_ids: tuple[int, ...] = ()  # the only tokens that the output may have; empty: all
    banned_runs: tuple[tuple[int, ...], ...] = ()  # no output token may complete one of these
    bad_words: tuple[str, ...] = ()  # texts of the banned runs, for external engines


class Sampling(TokenSampling, frozen=True, gc=False, omit_defaults=True):
    """Sampling parameters and requested log-probabilities."""

    num_logprobs: int | None = None  # None: no logprobs; N: the chosen token's, and the N best
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_from: int = 1  # index of the first prompt token with log-probabilities; the prefix cache ends there
    token_rules: TokenRules | None = None


class Stopping(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stop conditions. `max_tokens` counts output tokens.

    The engine server matches the stop strings, outside of reasoning.
    """

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    thought: ThoughtMarks | None = None  # None: the output has no reasoning that stop strings ignore
    thought_budget: ThoughtBudget | None = None
    includes_stop: bool = False  # the output's text ends with the stop string or the stop token's text


class SpeculativePrefillRequest(msgspec.Struct, frozen=True):
    """Likely next prompt, or the beginning of one, for speculative prefill. The request has no output.

    Its KV is computed while the engine is otherwise idle, and kept in the prefix cache.

    The request that it is expected to follow had the prompt's first `num_shared` tokens and then `other_ids`;
    `num_asked` of all these tokens were its own prompt. Its cached tokens beyond the shared ones are evicted first.
    """

    pattern: str  # key of conversations that continue alike; the likelihood is learned per key
    num_shared: int = 0
    other_ids: list[int] = []
    num_asked: int = 0


# ── to the engine ────────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A gateway introduces itself; the engine answers with a ModelCard.

    `replica_id` names the gateway's process, across all its connections: the process's unacknowledged usage is reported
    under that name.
    """

    gateway_id: str
    protocol_version: int = PROTOCOL_VERSION
    replica_id: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The gateway is alive, although it may have nothing to send."""

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
    cache_salt: bytes  # starts the prefix-cache hash chain: a tenant's requests with the same bytes share a cache
    arrival_unix_ns: int
    deadline_unix_ns: int | None = None
    tenant_weight: float = 1.0
    fallback: ServiceClass | None = None  # class for `service.on_overload` downgrade
    traceparent: str = ""  # W3C trace context
    resumed_ids: list[int] | None = None  # output so far of a request that another engine had admitted
    billing_context: bytes = msgspec.field(default=b"", name="bill")  # opaque to the engine; MeteredUsage returns it
    embed: bool = False  # return the prompt's embedding and no token: `max_tokens` and `credit_tokens` are 0
    second_segment_at: int = 0  # first token of the second text of a pair, for encoders; 0: one text
    gathers: bool = False  # the output is not streamed: after the first, tokens may be grouped
    sibling_tokens: int = 0  # tokens of the client's other prompts in the same request; the SLO covers them too
    shown_ids: tuple[int, ...] = ()  # special tokens that appear in the output text: the marks of tool calls
    grammar: GrammarSpec | None = None  # grammar of the output
    hand_over: KvHandoff | None = None  # end after the first token, and send the KV to another engine
    transfer_id: str = ""  # id of the KV transfer from the prefill engine
    adapter: str = ""  # id of an adapter that the engine holds; "": the base model
    speculative_prefill: SpeculativePrefillRequest | None = (
        None  # only if the card allows it; `max_tokens` and `credit_tokens` are 0
    )
    keep_s: float = 0.0  # retain the conversation in the prefix cache for so long
    marker_ids: tuple[int, ...] = ()  # added tokens that mark tool calls or reasoning; text that spells one is guarded
    images: list[ImageInput] = []  # only if the card has `images`; in the order of their placeholders in the prompt


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Raise a request's credit to `credit_tokens` in total.

    `last` means that no more credit follows: the end of the credit then ends the request with `length` and detail
    `credit_refused`.
    """

    request_id: str
    seq: int
    credit_tokens: int
    last: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request now and free its resources. The answer is Finished(abort) unless the request had already ended."""

    request_id: str
    seq: int


class UsageAcknowledgement(msgspec.Struct, frozen=True, tag="usage_acknowledgement"):
    """The usage of these requests of that gateway process is stored; the engine may forget it."""

    replica_id: str
    request_ids: list[str]


class SleepCommand(msgspec.Struct, frozen=True, tag="sleep"):
    """Fall asleep once the open requests have ended, or wake up.

    A sleeping engine accepts no requests, and its model uses no device memory. Loads report the progress.
    """

    asleep: bool


class AdapterPart(msgspec.Struct, frozen=True, tag="adapter_part"):
    """Part of an adapter's tensors.

    Parts are sent in order; the first contains the configuration. Both use PEFT's format.

    Once the last part has arrived, requests may name the adapter, until the engine answers that it is missing.
    """

    adapter_id: str
    index: int
    data: bytes
    config: str = ""  # JSON
    is_last: bool = False
    tenant_id: str = ""  # owner of the adapter


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Delete the data of these tenants from memory and disks. Their running requests leave no data behind.

    It is only sent to an engine whose card has `forgets`, and again whenever such an engine connects. So an engine may
    receive tenants that it has already deleted, or never had.
    """

    tenant_ids: list[str]


ToEngine = (
    Hello
    | Heartbeat
    | Submit
    | Extend
    | Abort
    | UsageAcknowledgement
    | SleepCommand
    | ExpertLoadQuery
    | ScaleExpertRanks
    | AdapterPart
    | Forget
    | FleetService
    | PrefixSubscription
)

# ── to the gateway ───────────────────────────────────────────────────────────────────────────────────────────────────


class ModelCard(msgspec.Struct, frozen=True, tag="card"):
    """Everything that a gateway must know about the model, so that it needs no model files."""

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
    embedding_width: int = 0  # dimensions of an embedding; 0 where the engine makes none
    unit_vectors: bool = True  # embeddings are divided by their length
    generates: bool = True  # False: an encoder, which serves only `Submit.embed`
    labels: tuple[str, ...] = ()  # of a classification head, whose logits `Submit.embed` then returns
    score_activation: str = ""  # sigmoid, softmax or identity: turns the logits into scores
    sampling_defaults: dict[str, float] = {}  # of requests without the parameter, by the names of `Sampling`
    extensible: bool = True  # False: credit cannot be raised, and the engine does not remember usage
    follows_grammars: bool = False
    tool_format: str = "auto"  # name of the model's tool-call format; auto: as the chat template shows
    reasoning_format: str = "auto"  # the same of its reasoning
    role: EngineRole = EngineRole.BOTH
    hands_over: bool = False  # the engine accepts `Submit.hand_over`
    kv_address: str = ""  # address for KV from other engines; "" if it receives none
    kv_host: str = ""  # engines on one host share memory
    kv_secret: str = ""  # key with which a gateway authorises transfers to it: see `transfer_token`
    kv_ranks: KvRanks = KvRanks()  # that receive KV, each at its own part of `kv_address`
    takes_adapters: bool = False
    adapters: tuple[str, ...] = ()  # adapters configured by the operator
    speculative_prefill: bool = False  # the engine accepts `Submit.speculative_prefill`
    forgets: bool = False  # the engine accepts `Forget`
    exchanges_service: bool = False  # the engine accepts `FleetService`, and its loads have `tenant_service`
    shows_special_tokens: bool = True  # False: the engine refuses `Submit.shown_ids`
    controls_reasoning: bool = False  # the engine keeps thought budgets, and follows grammars that include reasoning
    images: ImageRules | None = None  # None: the model takes no images
    image_allowance: ImageAllowance | None = None  # of an external engine that takes images in conversations
    publishes_prefixes: bool = False  # the engine accepts `PrefixSubscription`
    max_output_tokens: int | None = None  # of a request; None: the rest of the context
    serves_spot: bool = False  # requests of spot classes give way to those of all others
    model_digest: str = ""  # fingerprint of the checkpoint's files; "": unknown
    layout: str = ""  # of the ranks, such as tp=2
    batch_invariant: bool = False  # a request gets the same bits alone and in any batch
    device_group: str = ""  # engines of one group share a device, so that only some are awake; "": of its own


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True, tag="accepted"):
    """The scheduler has admitted the request; Finished or Failed will follow."""

    request_id: str
    seq: int
    served_class: str  # name of the fallback class where the request was downgraded
    reason: Reason
    predicted_ttft_s: float | None = None


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: str  # the token's text; an incomplete code point shows as U+FFFD
    token_bytes: bytes
    logprob: float
    token_id: int = -1  # -1: an external engine, which does not report it


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: str
    token_bytes: bytes
    logprob: float
    top: list[TopLogprob]
    token_id: int = -1  # -1: an external engine, which does not report it
    num_chars: int = -1  # characters that it completes in the output text, 0 without text; -1: unknown
    rank: int = 0  # of a prompt's token among all tokens, 1 for the most likely one; 0: unknown


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """Output tokens from `position` on, with the text that they complete.

    The text may be empty: the text of an unfinished code point, or of a possible stop string, comes with a later
    message. The first message has the number of prompt tokens that the prefix cache held.
    """

    request_id: str
    seq: int
    position: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0


class Finished(msgspec.Struct, frozen=True, omit_defaults=True, tag="finished"):
    """End of a request.

    `text` is the rest of the detokenized text. `num_output_tokens` counts the billable output positions: all up to and
    including the one that ended the request. `steps` are encoded StepNotes, since most of them are never read; only set
    for a request with a trace context.
    """

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
    num_recomputed_tokens: int = 0  # recomputed after preemptions; metered, not billed
    detail: str = ""  # the stop string that matched; max_tokens, context, credit_refused; silent_gateway, draining;
    # for disaggregated prefill, why the KV was not sent
    embedding: bytes = b""  # result of `Submit.embed`, unless aborted: a vector, little-endian float32
    num_drafted_tokens: int = 0  # draft tokens that were verified; not billed
    num_accepted_tokens: int = 0  # accepted draft tokens
    steps: bytes = b""
    prompt_logprobs: list[TokenLogprob] | None = (
        None  # if requested: of the prompt's tokens from `prompt_logprobs_from` on
    )
    arrival: KvTransferTimes | None = None  # transfer times of KV from the prefill engine
    # With `Submit.speculative_prefill`: tokens that were computed; `detail` then says how it ended. Otherwise:
    # cached tokens that speculative prefill had computed.
    num_speculative_tokens: int = 0
    expert_read_bytes: int = 0  # its share of the experts' weights that its steps read; 0 for a model without experts
    expert_moved_bytes: int = 0  # its share of the experts that were loaded or moved to other ranks for these steps
    expert_profile: bytes = b""  # experts that its decoded tokens used, a packed ExpertProfile; b"": not sampled


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """The engine could not serve the request. `num_output_tokens` counts the tokens emitted before."""

    request_id: str
    seq: int
    code: FailureCode
    message: str
    num_output_tokens: int = 0
    reason: Reason | None = None  # why, for `overloaded`
    retry_after_s: float | None = None  # predicted time after which a retry succeeds
    # If the core died: whether it was computing this request's first token, which may be the cause.
    in_first_step: bool | None = None
    expert_read_bytes: int = 0  # as in Finished
    expert_moved_bytes: int = 0


class MeteredUsage(msgspec.Struct, frozen=True, array_like=True):
    """Usage of one request that its gateway has not acknowledged. Tokens are counted as in Finished."""

    replica_id: str
    request_id: str
    billing_context: bytes  # as in Submit
    served_class: str
    num_cached_tokens: int
    num_output_tokens: int
    expert_read_bytes: int = 0
    expert_moved_bytes: int = 0


class UnacknowledgedUsage(msgspec.Struct, frozen=True, tag="unacknowledged"):
    """Usage of gateways that are gone. The receiver stores it and then acknowledges it."""

    engine_id: str
    records: list[MeteredUsage]


RequestEvent = Accepted | Tokens | Finished | Failed
ToGateway = ModelCard | RequestEvent | Load | UnacknowledgedUsage | ExpertLoad | ExpertBalance | PrefixEvents
