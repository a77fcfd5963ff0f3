"""Requests from their submission to the scheduler's queue: checks, the waits before the queue, and credit.

A request may have to wait for its KV from another engine, its images, its adapter, its grammar or its prompt's KV on
disk before it is queued (`pending_requests`). The time of these waits counts against its deadlines.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from moiety_engine.messages import CoreFailure, CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.pending_requests import PendingRequests, ReadyRequest
from moiety_wire.messages import FailureCode, FinishReason

if TYPE_CHECKING:
    from moiety_engine.adapters.adapter_slots import AdapterSlots
    from moiety_engine.disk.tier import DiskTier
    from moiety_engine.images.prompt_images import PromptImage
    from moiety_engine.kv_transfer.connector import KvConnector
    from moiety_engine.scheduling.scheduler import Scheduler
    from moiety_engine.step_reporter import StepReporter
    from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue
    from moiety_wire.images import ImageRules


class RequestIntake:
    """Entry of requests to the scheduler, and what they may wait for. Used by the step loop's thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        reporter: StepReporter,
        kv_connector: KvConnector,
        adapters: AdapterSlots,
        grammars: GrammarCompileQueue,
        disk: DiskTier | None,
        *,
        max_context_tokens: int,
        clock_ns: Callable[[], int],
        image_rules: ImageRules | None = None,
        embeds: bool = True,
    ) -> None:
        self.embeds = embeds  # False: the model makes no embeddings
        self.image_rules = image_rules  # None: the model takes no images
        self.kv_connector = kv_connector
        self.adapters = adapters
        self.grammars = grammars
        self.disk = disk
        self.max_context_tokens = max_context_tokens
        self.requests_total = 0
        self._scheduler = scheduler
        self._reporter = reporter
        self.pending_requests = PendingRequests(kv_connector.kv_receiver, adapters, grammars, disk, clock_ns)
        self._clock_ns = clock_ns

    @property
    def has_pending(self) -> bool:
        """True if requests wait to be queued."""
        return not self.pending_requests.is_empty

    def image_metrics(self) -> dict[str, float]:
        """Return fields of `LoadMetrics`; none for a model that takes no images."""
        return {} if self.image_rules is None else {"images_waiting": self.pending_requests.num_waiting_for_images}

    @property
    def waits_for_others(self) -> bool:
        """True if a request or a disk transfer is waiting on background work."""
        return self.has_pending or (self.disk is not None and not self.disk.is_quiet)

    def submit_request(self, submit: CoreSubmit) -> None:
        """Queue a request, now or once its waits are over.

        A request that cannot be served is reported as a failure. `max_tokens` is cut at the context length: beyond it
        there may be no block for the request, and it would wait forever.
        """
        if submit.speculative_prefill is not None:
            self._scheduler.add(submit, seed=0, now_ns=self._clock_ns())
            return
        self.requests_total += 1
        num_prompt = len(submit.prompt_ids)
        longest = self.max_context_tokens - (0 if submit.embed else 1)
        if not 1 <= num_prompt <= longest:
            message = f"the prompt has {num_prompt} tokens; it must have 1 to {longest}"
            self._reporter.add_failures(CoreFailure(submit.key, FailureCode.CONTEXT_LENGTH_EXCEEDED, message))
            return
        if (submit.images or submit.images_pending) and self.image_rules is None:
            message = "this model does not take images; send the request to a model that does, or leave them out"
            self._reporter.add_failures(CoreFailure(submit.key, FailureCode.INVALID_REQUEST, message))
            return
        max_tokens = self.max_context_tokens - num_prompt
        if not submit.embed and submit.max_tokens > max_tokens:
            submit = msgspec.structs.replace(
                submit, max_tokens=max_tokens, min_tokens=min(submit.min_tokens, max_tokens)
            )
        if submit.hand_over is not None:
            submit = self.kv_connector.depart(submit)
        if self.disk is not None and submit.adapter:
            submit = msgspec.structs.replace(submit, cache_salt=self.disk.salted(submit))
        if not self.pending_requests.must_wait(submit):
            self._queue(ReadyRequest(submit, None, False, self._clock_ns()))

    def extend_credit(self, key: int, credit_tokens: int, *, last: bool) -> None:
        """Raise a request's credit to `credit_tokens`, a total."""
        if not self.pending_requests.extend(key, credit_tokens, last=last):
            ended = self._scheduler.extend(key, credit_tokens, last=last, now_ns=self._clock_ns())
            self._reporter.add_output(ended)

    def add_images(self, key: int, images: tuple[PromptImage, ...]) -> None:
        """Give a request its decoded images. A request that has ended is ignored."""
        self.pending_requests.add_images(key, images)

    def abort_request(self, key: int, reason: FinishReason) -> None:
        """End a request before the next step; its blocks are free when this returns."""
        pending = self.pending_requests.remove_request(key)
        if pending is not None:
            num_resumed = len(pending.resumed_ids or ())
            ended = CoreFinish(reason, "", 0, num_resumed, 0, 0, self._clock_ns(), pending.service.name, (), 0)
            self._reporter.add_output(CoreOutput(key, [], None, ended))
        else:
            self._reporter.add_output(self._scheduler.abort(key, reason, now_ns=self._clock_ns()))

    def queue_ready(self) -> None:
        """Queue the pending requests whose waits are over, and report those that cannot be served."""
        if self.pending_requests.is_empty:
            return
        for ready in self.pending_requests.take_ready():
            self._queue(ready)
            if ready.is_last:
                self.extend_credit(ready.submit.key, ready.submit.credit_tokens, last=True)
        self._reporter.add_failures(*self.pending_requests.take_refused())

    def close(self) -> None:
        """Close the links to other engines, the grammar processes and the adapters' thread."""
        self.kv_connector.close()
        self.grammars.close()
        self.adapters.close()

    def _queue(self, ready: ReadyRequest) -> None:
        submit = ready.submit
        seed = submit.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        num_transferred_tokens = self.kv_connector.num_transferred_tokens(submit.key)
        self._scheduler.add(
            submit,
            seed=seed,
            now_ns=self._clock_ns(),
            received_ns=ready.received_ns,
            grammar=ready.grammar,
            num_transferred_tokens=num_transferred_tokens,
        )
