"""Health, model and load of an external engine."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from moiety_platform.engine_addresses import ExternalAddress, ExternalKind
from moiety_platform.external_engines.dialect import count_of
from moiety_platform.external_engines.events import BOM
from moiety_platform.external_engines.metrics import NAMES, ExternalMetrics, read_metrics
from moiety_platform.external_engines.probe_connection import InvalidBody, ProbeConnection, ProbeFailed
from moiety_text.folder import TextModel, read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.images import ImageAllowance
from moiety_wire.messages import ModelCard


class UnhealthyServer(Exception):
    """The server responds but cannot be used. The message says why."""


class ModelListUnavailable(UnhealthyServer):
    """A server without a health endpoint answers its model list with a transient error.

    That says nothing about its answers to requests.
    """


class NoResponse(Exception):
    """The server does not respond."""


class Prober:
    """Queries health, model and load of one server."""

    def __init__(
        self, address: ExternalAddress, connection: ProbeConnection, max_num_logprobs: int, timeout_s: float
    ) -> None:
        """Read the tokenizer. Raises moiety_text's errors if it cannot be used."""
        self._address = address
        self._connection = connection
        self._max_num_logprobs = max_num_logprobs
        self._timeout_s = timeout_s
        assert address.tokenizer is not None, "only hosted providers have no tokenizer"
        folder = address.tokenizer.parent if address.tokenizer.name == "tokenizer.json" else address.tokenizer
        self._text: TextModel = read_text_model(folder)
        self.tokenizer = Tokenizer.from_json(self._text.tokenizer_json)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._text.eos_token_ids

    async def check_health(self) -> None:
        """Check the health endpoint. Raises UnhealthyServer or Silent."""
        await self._get("/v1/models" if self._address.kind is ExternalKind.GENERIC else "/health")

    async def card(self) -> ModelCard:
        """Return the server's model card. Raises UnhealthyServer or Silent."""
        address, text = self._address, self._text
        model = self._find(await self._get_json("/v1/models"))
        created, image_tokens = model.get("created"), address.image_tokens
        return ModelCard(
            engine_id=address.name,
            model=address.model,
            family=address.kind.value,
            tokenizer_json=text.tokenizer_json,
            chat_template=text.chat_template,
            special_tokens=text.special_tokens,
            eos_token_ids=text.eos_token_ids,
            max_context_tokens=await self._context_tokens(model),
            vocab_size=self.tokenizer.vocab_size,
            max_num_logprobs=self._max_num_logprobs,
            created_unix_s=count_of(created) or 0,
            dtype="unknown",
            device="unknown",
            extensible=False,
            image_allowance=None if image_tokens is None else ImageAllowance(image_tokens=image_tokens),
            shows_special_tokens=address.kind in (ExternalKind.VLLM, ExternalKind.SGLANG),
        )

    async def metrics(self) -> ExternalMetrics | None:
        """Return the server's load, or None if it reports none. Raises Silent."""
        if self._address.kind not in NAMES:
            return None
        try:
            text = (await self._get("/metrics")).decode(errors="replace")
        except UnhealthyServer:
            return await self._slots() if self._address.kind is ExternalKind.LLAMA_CPP else None
        return read_metrics(self._address.kind, text)

    async def _slots(self) -> ExternalMetrics | None:
        """Return the load of a llama.cpp server that was started without metrics."""
        try:
            slots = await self._get_json("/slots")
        except UnhealthyServer:
            return None
        if not isinstance(slots, list):
            return None
        return ExternalMetrics(
            num_running=sum(isinstance(slot, dict) and slot.get("is_processing") is True for slot in slots)
        )

    async def _context_tokens(self, model: dict[str, Any]) -> int:
        max_model_len = model.get("max_model_len")
        if self._address.kind is ExternalKind.LLAMA_CPP:
            props = await self._get_json("/props")
            settings = props.get("default_generation_settings") if isinstance(props, dict) else None
            max_model_len = settings.get("n_ctx") if isinstance(settings, dict) else None
        known = [n for n in (count_of(max_model_len), self._address.context_tokens) if n is not None and n > 1]
        if not known:
            raise UnhealthyServer("does not report its context length; add context=TOKENS to its address")
        return min(known)

    def _find(self, answer: Any) -> dict[str, Any]:
        """Return the model's entry in the list of served models. llama.cpp serves one model under its file name."""
        listed = answer.get("data") if isinstance(answer, dict) else answer
        models = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        named = [one for one in models if one.get("id") == self._address.model]
        if named:
            return named[0]
        if self._address.kind is ExternalKind.LLAMA_CPP and models:
            return models[0]
        served = ", ".join(sorted(str(one.get("id")) for one in models)) or "none"
        raise UnhealthyServer(f"does not serve {self._address.model!r}, but {served}; correct model= in its address")

    async def _get_json(self, path: str) -> Any:
        try:
            return msgspec.json.decode((await self._get(path)).removeprefix(BOM))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnhealthyServer(f"answers {path} with a body that is not JSON") from error

    async def _get(self, path: str) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._connection.get(path)
        except InvalidBody as error:
            raise UnhealthyServer(f"answers {path} with {error}") from error
        except TimeoutError as error:
            raise NoResponse(f"did not answer {path} within {self._timeout_s:g} s") from error
        except ProbeFailed as error:
            raise UnhealthyServer(f"cannot be reached: {error}") from error
        if answer.status in (401, 403):
            raise UnhealthyServer("refuses the API key; set external_engine_api_key, or key_file= in its address")
        if answer.status != 200:
            may_pass = answer.status == 429 or answer.status >= 500
            is_generic = self._address.kind is ExternalKind.GENERIC
            kind = ModelListUnavailable if may_pass and is_generic else UnhealthyServer
            raise kind(f"answers {path} with status {answer.status}")
        return answer.body
