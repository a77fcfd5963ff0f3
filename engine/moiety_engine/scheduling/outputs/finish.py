"""Finish conditions of requests and the report of a finished request."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.messages import CoreFailure, CoreFinish
from moiety_engine.sequence import Sequence
from moiety_wire.messages import FailureCode, FinishReason


@dataclass(frozen=True, slots=True)
class NonFiniteEnd:
    """Request whose logits or vector were not finite, with the hashes of the blocks that were invalidated for it."""

    key: int
    adapter: str
    finish: CoreFinish  # its report up to here
    hashes: list[bytes]

    @property
    def message(self) -> str:
        """Explanation for the client."""
        if self.adapter:
            return (
                "the model computes values that are not finite with this adapter: see that its weights times "
                "lora_alpha / r are of the size that training left them at"
            )
        return "the model computed values that are not finite: the operator should check the checkpoint's weights"


def why_it_ends(sequence: Sequence, token_id: int) -> tuple[FinishReason, str] | None:
    """Return reason and detail if the sequence ends with `token_id`, its newest token; None if it goes on."""
    num_output, submit = len(sequence.tokens) - sequence.request.num_prompt, sequence.request.submit
    may_stop = (
        num_output >= submit.min_tokens or sequence.request.grammar is not None
    )  # its grammar prevents an early stop
    if may_stop and token_id in submit.stop_token_ids:
        return FinishReason.STOP, "stop_token"
    if num_output >= submit.max_tokens:
        return (FinishReason.LENGTH, "max_tokens") if submit.hand_over is None else (FinishReason.PREFILL_DONE, "")
    if sequence.credit_last and num_output >= sequence.credit_tokens:
        return FinishReason.LENGTH, "credit_refused"
    return None


def failure_after(finish: CoreFinish, key: int, code: FailureCode, message: str) -> CoreFailure:
    """Return the failure of a request that was ended with this report, with its usage up to here."""
    return CoreFailure(
        key,
        code,
        message,
        finish.num_output_tokens,
        expert_read_bytes=finish.expert_read_bytes,
        expert_moved_bytes=finish.expert_moved_bytes,
    )


def finish_of(sequence: Sequence, reason: FinishReason, detail: str, embedding: bytes) -> CoreFinish:
    """Return the report of a finished sequence for the engine server."""
    return CoreFinish(
        reason=reason,
        detail=detail,
        num_cached_tokens=sequence.kv.num_cached,
        num_output_tokens=sequence.num_output,
        scheduled_unix_ns=sequence.timeline.scheduled_unix_ns,
        first_token_unix_ns=sequence.timeline.first_token_unix_ns,
        finished_unix_ns=sequence.timeline.finished_unix_ns,
        served_class=sequence.service.name,
        events=sequence.timeline.events,
        num_recomputed_tokens=sequence.kv.num_recomputed,
        embedding=embedding,
        num_drafted_tokens=sequence.drafts.num_drafted,
        num_accepted_tokens=sequence.drafts.num_accepted,
        num_speculative_tokens=sequence.kv.num_speculative,
        expert_read_bytes=sequence.experts.read_bytes,
        expert_moved_bytes=sequence.experts.moved_bytes,
        expert_profile=b"" if (profile := sequence.experts.profile) is None else profile.pack(),
    )
