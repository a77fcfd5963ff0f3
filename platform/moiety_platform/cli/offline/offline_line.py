"""Offline processing of one line: from its text to the engine's sequences, and from their results to the answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from moiety_platform.batches.answers import answered, refused
from moiety_platform.batches.endpoints import ENDPOINTS, BatchEndpoint
from moiety_platform.batches.input_lines import RawLine, decode_body_of_line, read_line
from moiety_platform.classes.terms import ChosenClass
from moiety_platform.cli.offline.input_file import MAX_JSON_DEPTH, MAX_LINE_BYTES, Work
from moiety_platform.embeddings.answers import answer_pieces
from moiety_platform.embeddings.schemas import EmbeddingBody
from moiety_platform.embeddings.score_answers import PoolingResults, pooling_pieces
from moiety_platform.embeddings.score_schemas import PoolingBody
from moiety_platform.engine_client.stream import error_of
from moiety_platform.errors import BadRequest, NotFound, PlatformError
from moiety_platform.inference.answer_collection import AnswerChoice
from moiety_platform.inference.body_fields import InferenceBody
from moiety_platform.inference.engine_submits import RequestOrigin, check_limits, most_output_tokens, submits_of
from moiety_platform.inference.generation import (
    Conversation,
    Generation,
    PoolingTask,
    with_sampling_defaults,
    with_single_texts,
)
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.prompt_documents import INVALID_DOCUMENT
from moiety_platform.inference.run import Usage
from moiety_platform.inference.shape_limits import DEFAULT_SHAPE
from moiety_platform.openai_api.answers import AnswerHead, answer_of
from moiety_platform.openai_api.schemas import GenerationBody
from moiety_platform.routing.choose import MODEL_NOT_FOUND
from moiety_text.reasoning import AnswerReader
from moiety_wire.classes import BATCH
from moiety_wire.messages import Failed, Finished, ModelCard, Submit, Tokens

MAX_SEQUENCES = 4096  # per line
OWNER = "offline"
_UNBOUNDED = 2**31 - 1


@dataclass(slots=True)
class OfflineLine:
    """A line in progress; its answer is made from it (`whole.EndedRun`)."""

    work: Work
    endpoint: BatchEndpoint
    body: InferenceBody
    generation: Generation
    text: ModelText
    card: ModelCard
    prompts: list[list[int]]
    submits: list[Submit]
    arrival_unix_ns: int
    choices: list[AnswerChoice] = field(default_factory=list)
    num_open: int = 0
    output_ids: list[list[int]] = field(default_factory=list)
    failure: Failed | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.submits)

    def new_readers(self) -> list[AnswerReader] | None:
        return self.text.new_readers(self.generation, self.prompts)

    def usage(self) -> Usage:
        ends = [choice.finished for choice in self.choices if choice.finished is not None]
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            cached_tokens=sum(end.num_cached_tokens for end in ends[:: self.generation.num_choices]),
            output_tokens=sum(end.num_output_tokens for end in ends),
            reasoning_tokens=self.text.num_thought_tokens(self.generation, self.prompts, self.output_ids),
        )

    def take(self, index: int, message: Tokens | Finished | Failed) -> None:
        """Apply a message about one of its sequences."""
        choice = self.choices[index]
        if isinstance(message, Failed):
            self.failure = self.failure or message
            self.num_open -= 1
            return
        choice.text.append(message.text)
        if isinstance(message, Finished):
            choice.finished = message
            self.num_open -= 1
        else:
            choice.logprobs += message.logprobs or []
            self.output_ids[index] += message.token_ids

    def _pooling_results(self, answer_id: str) -> PoolingResults:
        vectors = [choice.end.embedding for choice in self.choices]
        parts = (self.text.labels, self.text.score_activation, self.usage().prompt_tokens)
        return PoolingResults(answer_id, self.card.model, self.generation.prompts, vectors, *parts)

    async def answer(self) -> bytes:
        """Return the output line, once every sequence has ended."""
        if self.failure is not None:
            return refusal(self.work, self.endpoint.id_prefix, error_of(self.failure))
        request_id = self.endpoint.id_prefix + self.work.key
        if isinstance(self.body, EmbeddingBody):
            vectors = [choice.end.embedding for choice in self.choices]
            pieces = answer_pieces(
                vectors,
                model=self.card.model,
                usage=self.usage(),
                dimensions=self.body.dimensions,
                as_base64=self.body.encoding_format == "base64",
                to_unit=self.text.unit_vectors,
            )
            return answered(self.work.key, self.work.custom_id, request_id, msgspec.Raw(b"".join(pieces)))
        if isinstance(self.body, PoolingBody):
            pieces = pooling_pieces(self.body, self._pooling_results(request_id))
            return answered(self.work.key, self.work.custom_id, request_id, msgspec.Raw(b"".join(pieces)))
        assert isinstance(self.body, GenerationBody), "there are no other bodies"
        head = AnswerHead(
            answer_id=request_id,
            created=self.arrival_unix_ns // 1_000_000_000,
            model=self.card.model,
            system_fingerprint=self.text.fingerprint,
            service_tier=_TIER,
        )
        body = await answer_of(self.body, self, head, self.choices)
        return answered(self.work.key, self.work.custom_id, request_id, body)


OFFLINE_ENDPOINTS = {
    path: endpoint
    for path, endpoint in ENDPOINTS.items()
    if issubclass(endpoint.schema, GenerationBody | EmbeddingBody | PoolingBody)
}
"""Endpoints that lines may ask without a gateway."""


async def ask(work: Work, data: bytes, card: ModelCard, text: ModelText) -> OfflineLine | bytes:
    """Return the line with the sequences for the engine, or the answer of an invalid line."""
    prefix = ""
    try:
        line = read_line(RawLine(work.number, work.start, data), MAX_LINE_BYTES, MAX_JSON_DEPTH)
        endpoint = OFFLINE_ENDPOINTS.get(line.url)
        if endpoint is None:
            message = f"'url' is {line.url[:64]!r}; it must be one of {', '.join(OFFLINE_ENDPOINTS)}"
            raise BadRequest(message, param="url", code="mismatched_endpoint")
        prefix = endpoint.id_prefix
        body = decode_body_of_line(endpoint, bytes(line.body), MAX_JSON_DEPTH, DEFAULT_SHAPE)
        generation = body.generation()
        if generation.model != card.model:
            message = f"this run serves {card.model!r}, not {generation.model[:256]!r}; change the line, or give --name"
            raise NotFound(message, code=MODEL_NOT_FOUND, param="model")
        if generation.task is PoolingTask.SCORE and len(card.labels) != 1:
            generation = with_single_texts(generation)
        generation = with_sampling_defaults(generation, card.sampling_defaults)
        check_limits(generation, len(generation.prompts) * generation.num_choices, card, MAX_SEQUENCES)
        if isinstance(generation.prompts[0], Conversation) and generation.prompts[0].documents:
            raise BadRequest("this command reads no files; send their text", param="messages", code=INVALID_DOCUMENT)
        prompts = await text.encode_prompts(generation)
        longest = [most_output_tokens(generation, card, len(prompt_ids)) for prompt_ids in prompts]
    except PlatformError as exc:
        return refusal(work, prefix, exc)
    now_ns = time.time_ns()
    origin = RequestOrigin(
        request_id=str(work.number),
        model=card.model,
        tenant_id=OWNER,
        chosen=_CHOSEN,
        cache_salt=OWNER.encode(),
        arrival_unix_ns=now_ns,
        credit_tokens=_UNBOUNDED,
    )
    submits = submits_of(origin, generation, prompts, longest, text)
    choices = [AnswerChoice() for _ in submits]
    output_ids: list[list[int]] = [[] for _ in submits]
    parts = (prompts, submits, now_ns, choices, len(submits), output_ids)
    return OfflineLine(work, endpoint, body, generation, text, card, *parts)


def refusal(work: Work, id_prefix: str, error: PlatformError) -> bytes:
    """Return the answer to a line that cannot be served: the error that a client would have received."""
    return refused(work.key, work.custom_id, id_prefix + work.key, error)


_CHOSEN = ChosenClass(BATCH, None)
_TIER = "flex"  # OpenAI has no other tier for work without a waiting client
