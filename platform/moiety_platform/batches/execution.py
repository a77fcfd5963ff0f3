"""One line of a batch, carried out as its key's holder would have it: the same pipeline, limits and recorder as a live
request. Knows no store.

What differs is the usage row: it is not written when the request ends but handed to the worker, which stores it with
the answer. Only an answer is billed; an attempt that is followed by another, or whose process was killed, leaves none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.principal import Principal
from moiety_platform.auth.scopes import INFERENCE_SCOPE, require_scope
from moiety_platform.backoff import Backoff
from moiety_platform.batches.answers import answered, line_key, refused
from moiety_platform.batches.claims import ClaimedLine, LineKey
from moiety_platform.batches.endpoints import ENDPOINTS
from moiety_platform.batches.lines import body_of
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
from moiety_platform.http_errors import OPENAI_ERRORS, internal_error
from moiety_platform.inference.pipeline import Pipeline
from moiety_platform.inference.request_body import decode_body
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.routing.choose import MODEL_NOT_FOUND
from moiety_platform.usage.row import UsageRow

MAX_FAILURES = 6  # attempts that fail otherwise than by being told to come back
MAX_RETRY_AFTER_S = 300.0  # a limit may be raised before it is renewed

log = structlog.get_logger(__name__)


class HeldRows:
    """Takes the usage rows of lines, for the worker to fetch. Nothing is written down of what is still running: a line
    whose process is killed is tried again under the same id."""

    def __init__(self) -> None:
        self._rows: dict[str, UsageRow] = {}

    def opened(self, row: UsageRow) -> None:
        """Nothing is billed before there is an answer."""

    def record(self, row: UsageRow, when_stored: Callable[[], None] | None = None) -> None:
        """Engines were given no bill, so there is nothing to tell them when it is stored."""
        self._rows[row.request_id] = row

    def take(self, request_id: str) -> UsageRow | None:
        return self._rows.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class KeyLost:
    """The key of the line's batch may not be used any more, so the batch cannot go on."""

    line: ClaimedLine
    error: PlatformError


Outcome = AnsweredLine | RequeuedLine | KeyLost


class LineRunner:
    """Answers the lines of one gateway process."""

    def __init__(
        self,
        authenticator: Authenticator,
        recorder: RequestRecorder,
        rows: HeldRows,
        pipeline: Pipeline,
        max_json_depth: int,
        shape: ShapeLimits,
        backoff: Backoff,
    ) -> None:
        self._authenticator = authenticator
        self._recorder = recorder
        self._rows = rows
        self._pipeline = pipeline
        self.max_json_depth, self.shape = max_json_depth, shape
        self._backoff = backoff
        self._records: dict[LineKey, RequestRecord] = {}  # of what is being answered

    def has_begun(self, key: LineKey) -> bool:
        """Whether a part of the line's answer has come."""
        record = self._records.get(key)
        return record is not None and record.first_token_s is not None

    async def run(self, line: ClaimedLine) -> Outcome:
        """What comes of one attempt. Raises nothing but CancelledError."""
        request_id = ENDPOINTS[line.batch.endpoint].id_prefix + line_key(*line.key)
        try:
            try:
                principal = await self._authenticator.principal_of(line.batch.key_id)
                require_scope(principal, INFERENCE_SCOPE)
            except Unauthenticated as exc:
                return KeyLost(line, exc)
            except Forbidden as exc:  # the tenant is suspended, which may end
                return self._wait(line, exc)
            answer = await self._answer(principal, line, request_id)
            return AnsweredLine(line, LineState.COMPLETED, answer, self._rows.take(request_id))
        except PlatformError as exc:
            forget_frames(exc)
            return self._judge(line, request_id, exc)
        except Exception:  # the root of a line: logged whole, tried a few times
            log.exception("batch_line_failed", batch_id=line.batch.id, line=line.number)
            return self._judge(line, request_id, internal_error())
        finally:
            self._records.pop(line.key, None)
            self._rows.take(request_id)

    async def _answer(self, principal: Principal, line: ClaimedLine, request_id: str) -> bytes:
        """The line of the output file. Raises the errors of `moiety_platform.errors`."""
        endpoint = ENDPOINTS[line.batch.endpoint]
        async with self._recorder.open(
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
            body = decode_body(endpoint.schema, body_of(line.text), self.max_json_depth, self.shape)
            answer = await endpoint.answer(self._pipeline, record, body)
            record.completed()
        return answered(line_key(*line.key), line.custom_id, request_id, answer)

    def _judge(self, line: ClaimedLine, request_id: str, error: PlatformError) -> Outcome:
        """Whether an error is worth another try."""
        if error.status in (429, 503) and not isinstance(error, RequestExceedsQuota):
            return self._wait(line, error)
        is_own = isinstance(error, NonFiniteOutput) or (isinstance(error, EngineRefused) and error.blames_request)
        may_pass = error.status >= 500 and not is_own  # which the same line meets again
        is_passing = may_pass or error.code == MODEL_NOT_FOUND  # an engine may be on its way up
        if is_passing and line.num_failures + 1 < MAX_FAILURES:
            return RequeuedLine(line, self._backoff.after(line.num_failures), line.num_refusals, line.num_failures + 1)
        answer = refused(line_key(*line.key), line.custom_id, request_id, error)
        return AnsweredLine(line, LineState.FAILED, answer, self._rows.take(request_id))

    def _wait(self, line: ClaimedLine, error: PlatformError) -> RequeuedLine:
        """Told to come back: for as long as the batch lasts, and not before the time that was told."""
        told_s = min(error.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
        wait_s = max(told_s, self._backoff.after(line.num_refusals))
        return RequeuedLine(line, wait_s, line.num_refusals + 1, line.num_failures, by_limit=error.status == 429)
