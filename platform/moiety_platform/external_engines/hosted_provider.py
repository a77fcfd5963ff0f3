"""Model card of a hosted provider, and the estimate of tokens that only the provider counts.

A provider has no health endpoint and reports no load: it counts as available, and the circuit breaker keeps requests
away from one that fails. Its tokenizer is not known. An estimated token has ESTIMATED_BYTES bytes of UTF-8, which is
usual for English; a prompt is reserved with one token for each byte, which no tokenizer of bytes exceeds.
"""

from __future__ import annotations

import msgspec

from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.external_engines.metrics import ExternalMetrics
from moiety_text.tokenizer import Tokenizer
from moiety_wire.images import ImageAllowance
from moiety_wire.messages import ModelCard

ESTIMATED_BYTES = 4  # of a token
MAX_VOCABULARY = 2**31 - 1  # ids of `logit_bias` are the provider's


def estimated_tokens(num_bytes: int) -> int:
    """Return the estimated number of tokens of a text, at least one if it has any bytes."""
    return -(-num_bytes // ESTIMATED_BYTES)


def estimated_ids(text: str) -> list[int]:
    """Return placeholders for the tokens of a text, as many as are estimated."""
    return [0] * estimated_tokens(len(text.encode(errors="replace")))


class HostedProvider:
    """Stands for a provider in place of a probe: its card comes from its address."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, address: ExternalAddress, max_num_logprobs: int) -> None:
        """Create the provider. `address` is one of the kind `hosted`."""
        self._address = address
        self._max_num_logprobs = max_num_logprobs
        self._tokenizer_json = _bytes_tokenizer()
        self.tokenizer = Tokenizer.from_json(self._tokenizer_json)

    async def check_health(self) -> None:
        """Do nothing: a provider has no health endpoint."""

    async def card(self) -> ModelCard:
        """Return the model card."""
        address = self._address
        assert address.context_tokens is not None and address.hosted is not None, "checked by ExternalAddress.parse"
        return ModelCard(
            engine_id=address.name,
            model=address.served_name or address.model,
            family=f"hosted-{address.protocol}",
            tokenizer_json=self._tokenizer_json,
            chat_template="",
            special_tokens={},
            eos_token_ids=(),
            max_context_tokens=address.context_tokens,
            vocab_size=MAX_VOCABULARY,
            max_num_logprobs=self._max_num_logprobs,
            created_unix_s=0,
            dtype="unknown",
            device="unknown",
            extensible=False,
            max_output_tokens=address.hosted.max_output_tokens,
            image_allowance=None if address.image_tokens is None else ImageAllowance(image_tokens=address.image_tokens),
        )

    async def metrics(self) -> ExternalMetrics | None:
        """Return None: a provider reports no load."""
        return None


def _bytes_tokenizer() -> str:
    """Return the tokenizer.json of a tokenizer with one token for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {spelled[byte]: byte for byte in range(256)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    made = {"version": "1.0", "added_tokens": [], "pre_tokenizer": steps, "decoder": steps, "model": model}
    return msgspec.json.encode(made).decode()
