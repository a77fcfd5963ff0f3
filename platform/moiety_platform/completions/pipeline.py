"""The life of a request, from what is asked to its last token. Knows no HTTP and no API's field names.

choose a class → pass the gate → tokenize → check the context → reserve under the limits → choose a replica for every
sequence and submit it → wait for the verdicts → merge what comes, reserving ahead of it → settle the counts
"""

from __future__ import annotations

import msgspec

from moiety_platform.admission.decide import refuse_hopeless
from moiety_platform.admission.gate import AdmissionGate, GatePlace
from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.terms import Catalogue, ChosenClass
from moiety_platform.clock import Clock
from moiety_platform.completions.generation import Generation, seed_of_choice
from moiety_platform.completions.placement import Placement
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.run import Run
from moiety_platform.completions.spending import Tariff
from moiety_platform.completions.text import UNKNOWN_TOKEN, ModelTexts
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import BadRequest, ContextTooLong, Overloaded, PlatformError
from moiety_platform.prices.cache import PriceCache
from moiety_platform.routing.choose import are_extensible, card_of, cards_of, choose
from moiety_platform.routing.replicas import Replicas
from moiety_platform.traces.request_trace import Phase
from moiety_wire.guides import Guide
from moiety_wire.messages import Card, Stopping, Submit


class Pipeline:
    """Carries out generations for one gateway process."""

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
    ) -> None:
        self._replicas = replicas
        self.texts = texts
        self._classes = classes
        self._prices = prices
        self._gate = gate
        self._clock = clock
        self._credit_window = credit_window
        self._max_sequences = max_sequences
        self._failover_wait_s = failover_wait_s

    def run(self, record: RequestRecord, generation: Generation, *, streams: bool = False) -> HeldRun:
        """Submit a request, whose reader wants each token as it comes if it `streams`, and hold it once every sequence
        of it is admitted. However this is left, every sequence is ended at its engine and counted in the record. Raises
        the errors of `moiety_platform.errors`; Overloaded where one of the sequences is turned away, and then the
        others are ended too."""
        return HeldRun(self, record, generation, streams)

    async def choose(self, record: RequestRecord, generation: Generation) -> _Choice:
        """What comes before the gate: whether there is such a model, and the class."""
        record.generation = generation
        states = self._replicas.states()
        try:
            card = card_of(states, generation.model, record.principal.allowed_models)
        except PlatformError:
            if generation.model in cards_of(states):  # there is such a model, if not for this request
                record.served_model = generation.model
            raise
        record.served_model = card.model
        self._check_limits(generation, card)
        cap = record.principal.service_class
        catalogue = await self._classes.get(cap)
        chosen = catalogue.choose(cap, generation.service_tier)
        record.chose(catalogue, chosen.service)
        return _Choice(card, states, catalogue, chosen)

    def enter(self, record: RequestRecord, generation: Generation) -> GatePlace:
        """The tenant's place at the gate. Raises Overloaded."""
        return self._gate.enter(record.principal.tenant_id, generation.num_sequences)

    async def prepare(
        self, record: RequestRecord, generation: Generation, choice: _Choice, streams: bool
    ) -> tuple[Run, list[Submit]]:
        """Everything between the gate and the first message to an engine."""
        card, catalogue, chosen = choice.card, choice.catalogue, choice.chosen
        state = choose(choice.states, generation.model, chosen.service)
        refusal = refuse_hopeless(chosen.service, state.class_load(chosen.service.name))
        if refusal is not None:
            raise Overloaded(refusal.message, refusal.reason, retry_after_s=refusal.retry_after_s)
        text = await self.texts.get(card)
        prompts = await text.encode(generation.prompts, generation.prompt_field)
        longest = [_max_tokens(generation, card, len(prompt_ids)) for prompt_ids in prompts]
        num_prompt_tokens = sum(map(len, prompts))
        is_extensible = are_extensible(choice.states, card.model)
        tariff = await self._tariff(card.model, catalogue, chosen)
        record.trace.enter(Phase.HOLD)
        credit = await record.spending.begin(
            num_prompt_tokens,
            generation.num_sequences,
            min(max(longest), self._credit_window) if is_extensible else max(longest),
            tariff,
        )
        record.trace.enter(Phase.ADMISSION)
        common = _Common(record, chosen, credit, record.reserved(num_prompt_tokens), num_prompt_tokens, not streams)
        submits = [
            submit
            for number, (prompt_ids, max_tokens) in enumerate(zip(prompts, longest, strict=True))
            for submit in _submits(
                common,
                generation,
                number,
                prompt_ids,
                max_tokens,
                text.shown_ids(generation.prompts[number]),
                generation.guide or text.guide_of_calls(generation.prompts[number]),
            )
        ]
        placement = Placement(self._replicas, generation.model, chosen.service, self._failover_wait_s)
        return Run(record, chosen, prompts, text, placement, self._clock, self._credit_window), submits

    async def _tariff(self, model: str, catalogue: Catalogue, chosen: ChosenClass) -> Tariff:
        prices = await self._prices.current()
        names = [service.name for service in (chosen.service, chosen.fallback) if service is not None]
        return Tariff({name: prices.of(model, name, catalogue[name].price_factor) for name in names})

    def _check_limits(self, generation: Generation, card: Card) -> None:
        if generation.embed:
            _check_embedding(generation, card)
        elif generation.num_sequences > self._max_sequences:
            raise BadRequest(
                f"{len(generation.prompts)} prompts × n={generation.num_choices} are {generation.num_sequences} "
                f"sequences; a request may have {self._max_sequences}. Split it into several",
                param="n",
            )
        num_logprobs = generation.sampling.num_logprobs
        if num_logprobs is not None and num_logprobs > card.max_num_logprobs:
            raise BadRequest(f"this model gives at most {card.max_num_logprobs} alternatives a token; ask for fewer")
        for name, ids in (
            ("logit_bias", generation.sampling.logit_bias),
            ("stop_token_ids", generation.stop_token_ids),
        ):
            if (largest := max(ids, default=0)) >= card.vocab_size:
                told = f"'{name}' has the token id {largest}; the model's are below {card.vocab_size}"
                raise BadRequest(told, code=UNKNOWN_TOKEN, param=name)


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
    """What a request goes to."""

    card: Card
    states: list[EngineState]  # as they were then
    catalogue: Catalogue
    chosen: ChosenClass


class _Common(msgspec.Struct, frozen=True):
    """What the sequences of one request have in common."""

    record: RequestRecord
    chosen: ChosenClass
    credit_tokens: int
    bill: bytes
    num_prompt_tokens: int
    gathers: bool


def _submits(
    common: _Common,
    generation: Generation,
    number: int,
    prompt_ids: list[int],
    max_tokens: int,
    shown_ids: tuple[int, ...],
    guide: Guide | None,
) -> list[Submit]:
    """Of one prompt."""
    record, chosen, seed = common.record, common.chosen, generation.sampling.seed
    stopping = Stopping(
        max_tokens=max_tokens,
        min_tokens=min(generation.min_tokens, max_tokens),
        stop=generation.stop,
        stop_token_ids=generation.stop_token_ids,
        ignore_eos=generation.ignore_eos,
    )
    first = number * generation.num_choices
    # inputs that are embedded are answered together, so each has the time that all of them are promised
    sibling_tokens = common.num_prompt_tokens - len(prompt_ids) if generation.embed else 0
    return [
        Submit(
            request_id=f"{record.request_id}-{first + choice}",
            seq=0,
            model=record.served_model,
            tenant_id=record.principal.tenant_id,
            service=chosen.service,
            prompt_ids=prompt_ids,
            sampling=msgspec.structs.replace(generation.sampling, seed=seed_of_choice(seed, choice))
            if choice
            else generation.sampling,
            stopping=stopping,
            credit_tokens=min(max_tokens, common.credit_tokens),
            cache_salt=record.principal.cache_salt,
            arrival_unix_ns=record.arrival_unix_ns,
            tenant_weight=record.principal.weight,
            fallback=chosen.fallback,
            traceparent=record.trace.traceparent,
            bill=common.bill,
            shown_ids=shown_ids,
            embed=generation.embed,
            sibling_tokens=sibling_tokens,
            gathers=common.gathers,
            guide=guide,
        )
        for choice in range(generation.num_choices)
    ]


def _check_embedding(generation: Generation, card: Card) -> None:
    width = card.embedding_width
    if not width:
        raise BadRequest(
            f"the engine of the model {card.model!r} makes no embeddings; use another model",
            code="embeddings_not_supported",
            param="model",
        )
    if generation.dimensions is not None and generation.dimensions > width:
        raise BadRequest(
            f"'dimensions' is {generation.dimensions}, and the vectors of {card.model!r} have {width} numbers; ask for "
            "as many or fewer",
            param="dimensions",
        )
    numbers = (generation.dimensions or width) * len(generation.prompts)
    if generation.max_numbers is not None and numbers > generation.max_numbers:
        raise BadRequest(
            f"the vectors of {len(generation.prompts):,} inputs have {numbers:,} numbers, and in this "
            f"'encoding_format' there may be {generation.max_numbers:,}; put fewer inputs into one line of the batch, "
            "or ask for fewer 'dimensions' or for 'base64'",
            code="answer_too_large",
            param="input",
        )


def _max_tokens(generation: Generation, card: Card, num_prompt_tokens: int) -> int:
    """How many tokens may follow the prompt. Raises ContextTooLong, which names both lengths."""
    left = card.max_context_tokens - num_prompt_tokens
    if generation.embed and left < 0:
        raise ContextTooLong(
            f"an input has {num_prompt_tokens} tokens; the model's context is {card.max_context_tokens} tokens. "
            "Split it into shorter ones",
            param=generation.prompt_field,
        )
    wanted = generation.max_tokens if generation.max_tokens is not None else max(1, left)
    if wanted > left:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and {wanted} are asked for, together "
            f"{num_prompt_tokens + wanted}; the model's context is {card.max_context_tokens} tokens. "
            "Shorten the prompt or lower max_tokens"
        )
    return wanted
