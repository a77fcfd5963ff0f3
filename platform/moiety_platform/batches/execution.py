"""Execution of one batch line on behalf of its key: the same pipeline, limits and recorder as a live request.

Knows no database. Only the usage row differs: it is not written when the request ends but handed to the worker, which
stores it with the answer. Only an answer is billed; an attempt that is followed by another, or whose process was
killed, leaves no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from moiety_platform.agent_runs.terms import names_run
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.principal import INFERENCE_SCOPE, Principal, require_scope
from moiety_platform.backoff import Backoff
from moiety_platform.batches.answers import answered, line_key, refused
from moiety_platform.batches.claims import ClaimedLine, LineKey
from moiety_platform.batches.endpoints import ENDPOINTS
from moiety_platform.batches.input_lines import body_of
from moiety_platform.batches.models import LineState
from moiety_platform.batches.outcomes import AnsweredLine, RequeuedLine
from moiety_platform.errors import (
    EngineRefused,
    Forbidden,
    NonFiniteOutput,
    PlatformError,
    RequestExceedsQuota,
    Unauthenticated,
    forget_frames,
)
from moiety_platform.files.contents import FileContents
from moiety_platform.http_errors import OPENAI_ERRORS, internal_error
from moiety_platform.inference.pipeline import RequestPipeline
from moiety_platform.inference.request_body import decode_body
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.routing.choose import MODEL_NOT_FOUND
from moiety_platform.usage.row import UsageRow

MAX_FAILURES = 6  # attempts that fail, without those that are told to retry later
MAX_RETRY_AFTER_S = 300.0  # a limit may be raised before its window ends

log = structlog.get_logger(__name__)


class HeldRows:
    """Usage rows of lines, kept for the worker.

    Running lines are not registered: a line whose process is killed is tried again under the same id.
    """

    def __init__(self) -> None:
        self._rows: dict[str, UsageRow] = {}

    def opened(self, row: UsageRow) -> None:
        """Do nothing: nothing is billed before there is an answer."""

    def record(self, row: UsageRow, when_stored: Callable[[], None] | None = None) -> None:
        """Keep a row; engines got no billing context, so no acknowledgement is needed when it is stored."""
        self._rows[row.request_id] = row

    def take(self, request_id: str) -> UsageRow | None:
        return self._rows.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class KeyLost:
    """The key of the line's batch is not valid any more, so the batch cannot continue."""

    line: ClaimedLine
    error: PlatformError


Outcome = AnsweredLine | RequeuedLine | KeyLost


@dataclass(eq=False, repr=False)
class LineRunner:
    """Runner of the lines of one gateway process."""

    authenticator: Authenticator
    recorder: RequestRecorder
    rows: HeldRows
    pipeline: RequestPipeline
    contents: FileContents
    max_json_depth: int
    shape: ShapeLimits
    backoff: Backoff
    _records: dict[LineKey, RequestRecord] = field(init=False, default_factory=dict)  # of running lines

    def has_begun(self, key: LineKey) -> bool:
        """Return whether a part of the line's answer has arrived."""
        record = self._records.get(key)
        return record is not None and record.first_token_s is not None

    async def run(self, line: ClaimedLine) -> Outcome:
        """Run one attempt and return its outcome. Raises nothing but CancelledError."""
        request_id = ENDPOINTS[line.batch.endpoint].id_prefix + line_key(*line.key)
        try:
            try:
                principal = await self.authenticator.principal_of(line.batch.key_id)
                require_scope(principal, INFERENCE_SCOPE)
                if self.authenticator.jwts is not None:
                    principal = await self.authenticator.jwts.limit_class(principal)
                if line.batch.end_user is not None:
                    principal = replace(principal, end_user=line.batch.end_user)
            except Unauthenticated as exc:
                return KeyLost(line, exc)
            except Forbidden as exc:  # the tenant is suspended, which may end
                return self._wait(line, exc)
            answer = await self._answer(principal, line, await self._read(line), request_id)
            return AnsweredLine(line, LineState.COMPLETED, answer, self.rows.take(request_id))
        except PlatformError as exc:
            forget_frames(exc)
            return self._judge(line, request_id, exc)
        except Exception:  # last resort of a line: log it, and retry a few times
            log.exception("batch_line_failed", batch_id=line.batch.id, line=line.number)
            return self._judge(line, request_id, internal_error())
        finally:
            self._records.pop(line.key, None)
            self.rows.take(request_id)

    async def _read(self, line: ClaimedLine) -> bytes:
        """Return the line's text from the input file. Raises Gone or Unavailable."""
        key = line.input_key or (await self.contents.locate(line.batch.input_file_id))[0]
        return await self.contents.read_range(key, line.start, line.num_bytes)

    async def _answer(self, principal: Principal, line: ClaimedLine, text: bytes, request_id: str) -> bytes:
        """Return the line of the output file. Raises the errors of `moiety_platform.errors`."""
        endpoint = ENDPOINTS[line.batch.endpoint]
        with self.recorder.open(
            principal,
            request_id=request_id,
            client_request_id=f"{line.batch.id}/{line.number}",
            operation=endpoint.operation,
            endpoint=endpoint.path,
            traceparent=None,
            status_of=OPENAI_ERRORS.status,
            bills_failures=False,
        ) as record:
            self._records[line.key] = record
            body = decode_body(endpoint.schema, body_of(text), self.max_json_depth, self.shape)
            record.attribution = body.attribution(None)
            if names_run(record.attribution.tags):
                record.agent_run = await self.pipeline.services.runs.join(record)
            answer = await endpoint.answer(self.pipeline, record, body)
            record.completed()
        return answered(line_key(*line.key), line.custom_id, request_id, answer)

    def _judge(self, line: ClaimedLine, request_id: str, error: PlatformError) -> Outcome:
        """Return the outcome of an error: a retry if it may pass, else the line's failure."""
        if error.status in (429, 503) and not isinstance(error, RequestExceedsQuota):
            return self._wait(line, error)
        is_own = isinstance(error, NonFiniteOutput) or (isinstance(error, EngineRefused) and error.blames_request)
        may_pass = error.status >= 500 and not is_own  # own errors occur again with the same line
        is_passing = may_pass or error.code == MODEL_NOT_FOUND  # an engine may be starting
        if is_passing and line.num_failures + 1 < MAX_FAILURES:
            return RequeuedLine(line, self.backoff.after(line.num_failures), line.num_refusals, line.num_failures + 1)
        answer = refused(line_key(*line.key), line.custom_id, request_id, error)
        return AnsweredLine(line, LineState.FAILED, answer, self.rows.take(request_id))

    def _wait(self, line: ClaimedLine, error: PlatformError) -> RequeuedLine:
        """Requeue a line that has to be retried later, as often as needed while the batch lasts.

        The retry does not precede the time that the error gives, up to MAX_RETRY_AFTER_S.
        """
        retry_after_s = min(error.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
        wait_s = max(retry_after_s, self.backoff.after(line.num_refusals))
        return RequeuedLine(line, wait_s, line.num_refusals + 1, line.num_failures, by_limit=error.status == 429)
