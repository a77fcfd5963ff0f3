"""Script of a scripted core: its answers, and the limits that it claims."""

from __future__ import annotations

import msgspec

from moiety_engine.scripted.text_model import END_ID, VOCAB_SIZE
from moiety_wire.trace_events import EventKind, Reason


class ScriptedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Admission decision of matching requests: rejected, unless `downgrades`.

    A downgraded request is served in its fallback class, if it has one.
    """

    reason: Reason
    service_class: str = ""  # "" applies to every class
    tenant_id: str = ""  # "" applies to every tenant
    retry_after_s: float | None = None
    downgrades: bool = False

    def applies(self, service_class: str, tenant_id: str) -> bool:
        return self.service_class in ("", service_class) and self.tenant_id in ("", tenant_id)


class ScriptedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that the core claims to have taken about each request, once it has `after_tokens` output tokens."""

    kind: EventKind
    reason: Reason
    after_tokens: int = 0
    names_another: bool = False  # names some other open request as the one that benefited


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Script of answers.

    The answer is `tokens`, or else the prompt's own tokens; then the end token, where that ends the request, otherwise
    from the beginning again. An embedding is a unit vector determined by the prompt's tokens.
    """

    tokens: tuple[int, ...] | None = None
    tokens_per_step: int = 1  # per request
    step_delay_s: float = 0.0
    max_running: int = 256
    num_blocks: int = 65_536
    block_size: int = 16
    max_context_tokens: int = 8192
    max_num_logprobs: int = 20
    vocab_size: int = VOCAB_SIZE
    embedding_width: int = 16  # 0: a core without embeddings
    labels: tuple[str, ...] = ()  # of an encoder with a classification head, which generates nothing
    end_token_id: int = END_ID
    verdicts: tuple[ScriptedDecision, ...] = ()  # the first match applies; without one a request is admitted
    events: tuple[ScriptedEvent, ...] = ()
    predicted_ttft_s: dict[str, float] = {}  # by class; 0 for classes that are not named
    traced_steps_per_s: float = 20.0  # sampled for traces
    dies_at_step: int | None = None  # a core in its own process exits before this step
    loads_for_ever: bool = False  # a core in its own process never becomes ready
    refuses: str = ""  # a core in its own process refuses to start, with this message
