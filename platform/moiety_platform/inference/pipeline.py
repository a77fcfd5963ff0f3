"""The life of a request, from what is asked to its last token. Knows no HTTP and no API's field names.

choose a class → pass the gate → tokenize → check the context → reserve under the limits → choose a replica for every
sequence and submit it → wait for the verdicts → merge what comes, reserving ahead of it → settle the counts
"""

from __future__ import annotations

import msgspec

from moiety_platform.adapters.cache import AdapterCache, NamedAdapter
from moiety_platform.adapters.naming import adapting_card, allowed_of
from moiety_platform.admission.gate import AdmissionGate, GatePlace, refuse_hopeless
from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.terms import Catalogue, ChosenClass
from moiety_platform.clock import Clock
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import Overloaded, PlatformError
from moiety_platform.inference.engine_submits import RequestOrigin, check_limits, most_output_tokens, submits_of
from moiety_platform.inference.generation import Generation
from moiety_platform.inference.model_texts import ModelTexts
from moiety_platform.inference.placement import Placement
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import Run
from moiety_platform.prices.cache import PriceCache
from moiety_platform.prices.terms import Tariffs
from moiety_platform.routing.choose import Need, able_engines, are_extensible, card_of, cards_of, choose
from moiety_platform.routing.replicas import Replicas
from moiety_platform.traces.request_trace import Phase
from moiety_wire.messages import ModelCard, Submit


class Pipeline:
    """Carries out generations for one gateway process. Its public numbers may be set to others, for the requests that
    come from then on."""

    def __init__(
        self,
        replicas: Replicas,
        texts: ModelTexts,
        classes: ClassCache,
        prices: PriceCache,
        gate: AdmissionGate,
        clock: Clock,
        *,
        credit_window: int,
        max_sequences: int,
        failover_wait_s: float,
        adapters: AdapterCache | None = None,
    ) -> None:
        self._replicas = replicas
        self.texts = texts
        self._classes = classes
        self._prices = prices
        self._tariffs = Tariffs()
        self.gate = gate
        self._clock = clock
        self.credit_window, self.max_sequences = credit_window, max_sequences
        self.failover_wait_s = failover_wait_s
        self._adapters = adapters

    def run(self, record: RequestRecord, generation: Generation, *, streams: bool = False) -> HeldRun:
        """Submit a request, whose reader wants each token as it comes if it `streams`, and hold it once every sequence
        of it is admitted. However this is left, every sequence is ended at its engine and counted in the record. Raises
        the errors of `moiety_platform.errors`; Overloaded where one of the sequences is turned away, and then the
        others are ended too."""
        return HeldRun(self, record, generation, streams)

    async def choose(self, record: RequestRecord, generation: Generation) -> _Choice:
        """Choose the model card and the service class, before admission."""
        record.generation = generation
        states, adapter = self._replicas.states(), None
        if self._adapters is not None:
            adapter = await self._adapters.find(record.principal.tenant_id, generation.model)
        base = generation.model if adapter is None else adapter.model
        try:
            card = card_of(states, base, allowed_of(record.principal.allowed_models, adapter))
        except PlatformError:
            if base in cards_of(states):  # there is such a model, if not for this request
                record.served_model, record.base_model = generation.model, base
            raise
        record.served_model, record.base_model = generation.model, base
        if adapter is not None:
            card = adapting_card(adapter, card, able_engines(states, base))
        check_limits(generation, card, self.max_sequences)
        cap = record.principal.service_class
        catalogue = await self._classes.get(cap)
        chosen = catalogue.choose(cap, generation.service_tier)
        record.chose(catalogue, chosen.service)
        return _Choice(card, states, catalogue, chosen, adapter)

    def enter(self, record: RequestRecord, generation: Generation) -> GatePlace:
        """The tenant's place at the gate. Raises Overloaded."""
        return self.gate.enter(record.principal.tenant_id, generation.num_sequences)

    async def prepare(
        self, record: RequestRecord, generation: Generation, choice: _Choice, streams: bool
    ) -> tuple[Run, list[Submit]]:
        """Everything between the gate and the first message to an engine."""
        card, catalogue, chosen = choice.card, choice.catalogue, choice.chosen
        credit_window, failover_wait_s = self.credit_window, self.failover_wait_s
        need = Need.PROMPT if generation.embed else Need.ANSWER
        need = need if choice.adapter is None else Need.ADAPTED
        state = choose(choice.states, card.model, chosen.service, need=need)
        refusal = refuse_hopeless(chosen.service, state.class_load(chosen.service.name))
        if refusal is not None:
            raise Overloaded(refusal.message, refusal.reason, retry_after_s=refusal.retry_after_s)
        text = await self.texts.get(card)
        prompts = await text.encode_prompts(generation)
        longest = [most_output_tokens(generation, card, len(prompt_ids)) for prompt_ids in prompts]
        num_prompt_tokens = sum(map(len, prompts))
        is_extensible = are_extensible(choice.states, card.model)
        own = "" if choice.adapter is None else f":{choice.adapter.engine_name}"  # names of adapters are their tenants'
        prices = await self._prices.current()
        tariff = self._tariffs.of(prices, catalogue, chosen, card.model + own, card.model)
        record.trace.enter(Phase.HOLD)
        credit = await record.spending.begin(
            num_prompt_tokens,
            generation.num_sequences,
            min(max(longest), credit_window) if is_extensible else max(longest),
            tariff,
        )
        record.trace.enter(Phase.ADMISSION)
        principal = record.principal
        adapter = "" if choice.adapter is None else choice.adapter.engine_name
        origin = RequestOrigin(
            request_id=record.request_id,
            model=card.model,
            tenant_id=principal.tenant_id,
            chosen=chosen,
            cache_salt=principal.cache_salt + adapter.encode(),
            arrival_unix_ns=record.arrival_unix_ns,
            credit_tokens=credit,
            weight=principal.weight,
            traceparent=record.trace.traceparent,
            bill=record.reserved(num_prompt_tokens),
            gathers=not streams,
            adapter=adapter,
        )
        submits = submits_of(origin, generation, prompts, longest, text)
        placement = Placement(self._replicas, card.model, chosen.service, failover_wait_s)
        return Run(record, chosen, prompts, text, placement, self._clock, credit_window), submits


class HeldRun:
    """A run that is held for as long as its context lasts; see `Pipeline.run`."""

    __slots__ = ("_generation", "_pipeline", "_place", "_record", "_run", "_streams")

    def __init__(self, pipeline: Pipeline, record: RequestRecord, generation: Generation, streams: bool) -> None:
        self._pipeline, self._record, self._generation, self._streams = pipeline, record, generation, streams
        self._place: GatePlace | None = None
        self._run: Run | None = None

    async def __aenter__(self) -> Run:
        try:
            return await self._admit()
        except BaseException:
            await self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    async def _admit(self) -> Run:
        """Submit every sequence and wait for the verdicts."""
        pipeline, record, generation = self._pipeline, self._record, self._generation
        record.trace.enter(Phase.PREPARE)
        choice = await pipeline.choose(record, generation)
        self._place = pipeline.enter(record, generation)
        run, submits = await pipeline.prepare(record, generation, choice, self._streams)
        self._run = run
        record.spending.require_current()
        for submit in submits:
            await run.submit(submit)
        await run.wait_admitted()
        record.trace.enter(Phase.ANSWER)
        return run

    async def _leave(self) -> None:
        try:
            if self._run is not None:
                await self._run.close()
        finally:
            if self._place is not None:
                self._place.leave()


class _Choice(msgspec.Struct, frozen=True):
    """Model card, engines and class that a request was matched with."""

    card: ModelCard
    states: list[EngineState]  # as they were then
    catalogue: Catalogue
    chosen: ChosenClass
    adapter: NamedAdapter | None
