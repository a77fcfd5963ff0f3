"""Manager of the open requests of all gateways, from submission to their end.

Every submitted request gets exactly one Finished or Failed while its gateway is connected. The manager uses no sockets:
it posts messages to sessions and collects commands for the core.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container

import msgspec
import structlog

from moiety_engine.image_decoding.decode_queue import ImageDecodeQueue
from moiety_engine.image_decoding.decoder import ImageFailure
from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.messages import (
    CoreAbort,
    CoreAdmission,
    CoreExtend,
    CoreFailure,
    CoreFinish,
    CoreFleetService,
    CoreForget,
    CoreImages,
    CoreLoad,
    CoreStep,
    CoreSubmit,
    ToCore,
    TracedStep,
)
from moiety_engine.server.request import OpenRequest, TokenTable
from moiety_engine.server.sessions import GatewaySession
from moiety_engine.server.usage_meter import UsageMeter
from moiety_engine.server.validation import ModelLimits, Refusal, find_refusal, to_core
from moiety_text.tokenizer import Tokenizer
from moiety_wire.codec import encode_step
from moiety_wire.fleet_service import FleetService
from moiety_wire.messages import Abort, Extend, Failed, FailureCode, FinishReason, Submit, ToGateway
from moiety_wire.trace_events import Reason

log = structlog.get_logger()

Post = Callable[[GatewaySession, ToGateway], None]

SILENT_GATEWAY = "silent_gateway"
DRAINED = "draining"
PREFILL_DROPPED = "forgone"
MAX_REMEMBERED = 16_384
FORGOTTEN = "forgotten"


class RequestManager:
    """Owns the open requests. Used by one thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        post: Post,
        meter: UsageMeter,
        *,
        adapters: Container[str] = (),
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Create the manager. `adapters` are those that requests may name."""
        self.limits: ModelLimits | None = None  # None until the core is ready
        self.is_draining = False
        self.is_awake = True
        self._tokenizer = tokenizer
        self._table = TokenTable(tokenizer)
        self._post = post
        self._meter = meter
        self._adapters = adapters
        self._clock_ns = clock_ns
        self._open: dict[int, tuple[OpenRequest, GatewaySession]] = {}
        self._ended: dict[int, str] = {}  # key → request id of recently ended requests, which events may still name
        self._commands: list[ToCore] = []
        self._num_keys = 0
        self.images: ImageDecodeQueue | None = None  # None: the model takes no images

    @property
    def num_open(self) -> int:
        return len(self._open)

    def adapters_in_use(self) -> set[str]:
        """Return the adapters of all open requests."""
        return {request.submit.adapter for request, _ in self._open.values()} - {""}

    def take_commands(self) -> list[ToCore]:
        """Return the commands for the core since the last call."""
        commands, self._commands = self._commands, []
        return commands

    # ── from gateways ────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, session: GatewaySession, submit: Submit) -> None:
        refusal = self._refuse(session, submit)
        if refusal is not None or self.limits is None:
            code, message = refusal or (FailureCode.OVERLOADED, "the engine is still loading its model; try again soon")
            self._post(session, Failed(submit.request_id, 0, code, message))
            return
        self._num_keys += 1
        key = self._num_keys  # from 1: in an event, 0 means no request
        command = to_core(submit, self.limits, key)
        request = OpenRequest(
            msgspec.structs.replace(submit, images=[]) if submit.images else submit,
            key,
            self._tokenizer,
            self._table,
            max_tokens=command.max_tokens,
            now_unix_ns=self._clock_ns(),
        )
        self._open[key] = (request, session)
        session.open_keys[submit.request_id] = key
        ended = request.resume(submit.resumed_ids or [], command.stop_token_ids)
        if ended is None and submit.images:
            self._submit_with_images(submit, command)
        elif ended is None:
            self._commands.append(command)
        else:
            admission = CoreAdmission(key, submit.service.name, Reason.FAILED_OVER, None)
            self._post(session, request.accept(admission))
            self._finish(request, session, ended)

    def _submit_with_images(self, submit: Submit, command: CoreSubmit) -> None:
        """Submit a request to the core, where it waits for its images unless they are decoded already."""
        assert self.images is not None, "images are only accepted where they can be decoded"
        found = self.images.queue_images(command.key, submit)
        match found:
            case ImageFailure():
                self._fail(*self._open[command.key], found.of_request(command.key))
            case None:
                self._commands.append(msgspec.structs.replace(command, images_pending=True))
            case _:
                self._commands.append(msgspec.structs.replace(command, images=found))

    def take_images(self, key: int, result: tuple[PromptImage, ...] | ImageFailure) -> None:
        """Give the core the decoded images of a request that waits for them, or fail the request."""
        if isinstance(result, ImageFailure):
            self._commands.append(CoreAbort(key, FinishReason.ABORT))
            self._fail(*self._open[key], result.of_request(key))
        else:
            self._commands.append(CoreImages(key, result))

    def forget_tenants(self, tenant_ids: list[str]) -> None:
        """Drop the cached images of these tenants, and delete their data in the core."""
        if self.images is not None:
            self.images.forget_tenants(tenant_ids)
        self._commands.append(CoreForget(tenant_ids))

    def forward_fleet_service(self, message: FleetService, engine_id: str) -> None:
        """Pass the reports of other replicas to the core; a report of this engine itself is left out."""
        replicas = [one for one in message.replicas if one.engine_id != engine_id]
        if replicas:
            self._commands.append(CoreFleetService(replicas))

    def with_image_metrics(self, load: CoreLoad) -> CoreLoad:
        """Return the core's figures with those of decoding images."""
        return load if self.images is None else msgspec.structs.replace(load, **self.images.metrics())

    def _refuse(self, session: GatewaySession, submit: Submit) -> tuple[FailureCode, str] | None:
        if self.limits is None:
            return None
        if self.is_draining:
            return FailureCode.DRAINING, "the engine is shutting down; send the request to another one"
        if not self.is_awake:
            return (
                FailureCode.DRAINING,
                "the engine is sleeping or about to sleep; wake it, or send the request to another one",
            )
        if submit.billing_context and not session.gateway_id:
            return FailureCode.ENGINE_FAILED, "this connection was closed; send Hello and then the request again"
        if submit.request_id in session.open_keys:
            return FailureCode.INVALID_REQUEST, "a request with this id is still open; choose another id"
        refusal = find_refusal(submit, self.limits)
        if refusal is None and submit.adapter and submit.adapter not in self._adapters:
            refusal = Refusal(
                FailureCode.ADAPTER_MISSING, "the engine does not have this adapter; send the adapter again"
            )
        if refusal is None and self.images is not None and self.images.lacks_images(submit):
            refusal = Refusal(FailureCode.IMAGES_MISSING, "the engine does not have these images; send the files again")
        return None if refusal is None else (refusal.code, refusal.message)

    def extend(self, session: GatewaySession, extend: Extend) -> None:
        key = session.open_keys.get(extend.request_id)
        if key is not None:
            request, _ = self._open[key]
            request.credit_tokens = max(request.credit_tokens, extend.credit_tokens)
            self._commands.append(CoreExtend(key, extend.credit_tokens, extend.last))

    def abort(self, session: GatewaySession, abort: Abort) -> None:
        """Abort a request. A request that has already ended is ignored: the two messages have crossed."""
        key = session.open_keys.get(abort.request_id)
        if key is not None:
            self._abort(key, "")

    def abort_session(self, session: GatewaySession, detail: str = SILENT_GATEWAY) -> None:
        for key in list(session.open_keys.values()):
            self._abort(key, detail)

    def abort_speculative_prefills(self) -> None:
        """Abort all speculative prefills."""
        for key, (request, _) in list(self._open.items()):
            if request.submit.speculative_prefill is not None:
                self._abort(key, PREFILL_DROPPED)

    def abort_all(self) -> None:
        for key in list(self._open):
            self._abort(key, DRAINED)

    def _abort(self, key: int, detail: str) -> None:
        request, _ = self._open[key]
        if request.stopped_by is None:  # otherwise the core is already ending it
            request.abort_detail = request.abort_detail or detail
            self._commands.append(CoreAbort(key, FinishReason.ABORT))

    # ── from the core ────────────────────────────────────────────────────────────────────────────────────────────────

    def take_step(self, step: CoreStep) -> None:
        for admission in step.admissions:
            found = self._open.get(admission.key)
            if found is not None:
                request, session = found
                self._post(session, request.accept(admission))
                self._meter.begin(session.replica_id, request)
        for traced in step.traced:  # after admissions, which set the class, and before ends, which send the steps
            self._report_step(traced)
        for output in step.outputs:
            found = self._open.get(output.key)
            if found is None:
                continue
            request, session = found
            if output.scores is not None:
                request.take_scores(output.scores)
                continue
            tokens = request.take_tokens(output)
            if tokens is not None:
                self._post(session, tokens)
                if request.stopped_by is not None and output.finish is None:
                    self._commands.append(CoreAbort(output.key, FinishReason.STOP))
            if output.finish is not None:
                self._finish(request, session, output.finish)
        for failure in step.failures:
            found = self._open.get(failure.key)
            if found is not None:
                self._fail(*found, failure)

    def _report_step(self, traced: TracedStep) -> None:
        """Add a step's notes to each request that ran in it."""
        requests = [found[0] for key in traced.keys if (found := self._open.get(key)) is not None]
        classes = Counter(request.served_class for request in requests if request.submit.speculative_prefill is None)
        packed = encode_step(msgspec.structs.replace(traced.step, classes=dict(classes)))
        for request in requests:
            request.ran_in(packed)

    def fail_all(self, code: FailureCode, message: str, first_step_keys: Container[int] | None = None) -> None:
        """Fail all open requests, because the core is gone.

        `first_step_keys` are the requests whose first token the core was computing when it died; None if unknown.
        """
        for request, session in list(self._open.values()):
            in_first_step = None if first_step_keys is None else request.key in first_step_keys
            self._fail(request, session, CoreFailure(request.key, code, message, in_first_step=in_first_step))
        self._commands.clear()

    def _finish(self, request: OpenRequest, session: GatewaySession, finish: CoreFinish) -> None:
        self._close(request, session)
        self._release(request, session)
        message = request.finish(finish, self._name_of)
        self._meter.note(session.replica_id, request.submit, message, request.served_class)
        self._post(session, message)

    def _fail(self, request: OpenRequest, session: GatewaySession, failure: CoreFailure) -> None:
        if request.stopped_by is not None:  # its output was sent completely, so the later failure is irrelevant
            ended = CoreFinish(
                *(FinishReason.STOP, "", 0, request.num_output, 0, 0, self._clock_ns(), request.served_class, (), 0),
                expert_read_bytes=failure.expert_read_bytes,
                expert_moved_bytes=failure.expert_moved_bytes,
            )
            self._finish(request, session, ended)
            return
        self._close(request, session)
        self._release(request, session)
        message = request.fail(failure)
        self._meter.note(session.replica_id, request.submit, message, request.served_class)
        self._post(session, message)

    def _release(self, request: OpenRequest, session: GatewaySession) -> None:
        """Send the held tokens before the end."""
        tokens = request.release()
        if tokens is not None:
            self._post(session, tokens)

    def _close(self, request: OpenRequest, session: GatewaySession) -> None:
        del self._open[request.key]
        if self.images is not None:
            self.images.forget_request(request.key)
        del session.open_keys[request.request_id]
        self._ended[request.key] = request.request_id
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _name_of(self, key: int) -> str:
        """Return the id of a request that an event names, open or ended; "forgotten" if it ended long ago."""
        found = self._open.get(key)
        return self._ended.get(key, FORGOTTEN) if found is None else found[0].request_id
