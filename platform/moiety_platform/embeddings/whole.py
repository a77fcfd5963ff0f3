"""Vectors of a complete request, for clients and batches. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moiety_platform.embeddings.answers import answer_pieces
from moiety_platform.embeddings.schemas import EmbeddingBody
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun
from moiety_wire.messages import Finished


async def collect(run: InferenceRun) -> list[bytes]:
    """Wait for the vectors of all inputs and return them in order."""
    vectors = [b""] * run.num_sequences
    async for index, message in run:
        if isinstance(message, Finished):
            vectors[index] = message.embedding
    return vectors


def pieces_of(
    body: EmbeddingBody, run: InferenceRun, record: RequestRecord, vectors: Sequence[bytes]
) -> Iterator[bytes]:
    """Yield OpenAI's answer with the collected vectors, a few at a time."""
    return answer_pieces(
        vectors,
        model=record.served_model,
        usage=run.usage(),
        dimensions=body.dimensions,
        as_base64=body.encoding_format == "base64",
        to_unit=run.text.unit_vectors,
    )
