"""What a scripted core answers, and the limits that it pretends to have."""

from __future__ import annotations

import msgspec

from moiety_engine.scripted.text_model import END_ID, VOCAB_SIZE
from moiety_wire.notes import EventKind, Reason


class ScriptedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of requests at their admission. Rejected, unless `downgrades`: then they are served in their
    fallback class, as far as they have one."""

    reason: Reason
    service_class: str = ""  # "" applies to every class
    tenant_id: str = ""  # "" applies to every tenant
    retry_after_s: float | None = None
    downgrades: bool = False

    def applies(self, service_class: str, tenant_id: str) -> bool:
        return self.service_class in ("", service_class) and self.tenant_id in ("", tenant_id)


class ScriptedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that the core pretends to have taken about each request, once it has so many output tokens."""

    kind: EventKind
    reason: Reason
    after_tokens: int = 0
    names_another: bool = False  # as the one that profited: some other request that is open


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is `tokens`, or else the prompt's own tokens; then the end token, where that ends the request, and
    from the beginning again where it does not. An embedding is a unit vector that follows from the prompt's tokens."""

    tokens: tuple[int, ...] | None = None
    tokens_per_step: int = 1  # of each request
    step_delay_s: float = 0.0
    max_running: int = 256
    num_blocks: int = 65_536
    block_size: int = 16
    max_context_tokens: int = 8192
    max_num_logprobs: int = 20
    vocab_size: int = VOCAB_SIZE
    embedding_width: int = 16  # 0: a core that makes no embeddings
    end_token_id: int = END_ID
    verdicts: tuple[ScriptedDecision, ...] = ()  # the first that applies holds; without one a request is admitted
    events: tuple[ScriptedEvent, ...] = ()
    predicted_ttft_s: dict[str, float] = {}  # by class; 0 for those that are not named
    traced_steps_per_s: float = 20.0  # of those that it looks at closely
    dies_at_step: int | None = None  # a core in its own process ends unasked before this step
    loads_for_ever: bool = False  # a core in its own process never gets ready
    refuses: str = ""  # a core in its own process refuses to start, with these words
