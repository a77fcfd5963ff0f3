"""Admission: of new requests to the queue, and of waiting requests to the batch by batching strategy."""
