"""What a scripted core answers, and the limits that it pretends to have."""

from __future__ import annotations

import msgspec

from moiety_engine.scripted.text_model import END_ID, VOCAB_SIZE


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is `tokens`, or else the prompt's own tokens; then the end token, where that ends the request, and
    from the beginning again where it does not."""

    tokens: tuple[int, ...] | None = None
    tokens_per_step: int = 1  # of each request
    step_delay_s: float = 0.0
    max_running: int = 256
    num_blocks: int = 65_536
    block_size: int = 16
    max_context_tokens: int = 8192
    max_num_logprobs: int = 20
    vocab_size: int = VOCAB_SIZE
    end_token_id: int = END_ID
    dies_at_step: int | None = None  # a core in its own process ends unasked before this step
    loads_for_ever: bool = False  # a core in its own process never gets ready
    refuses: str = ""  # a core in its own process refuses to start, with these words
