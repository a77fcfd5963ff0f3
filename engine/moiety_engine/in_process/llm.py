"""A model as a Python object, for evaluations and reinforcement-learning loops.

It has no tenants: every prompt belongs to one tenant and the batch class.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import msgspec

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.errors import EngineError, InvalidConfig, InvalidRequest
from moiety_engine.in_process.outputs import Completion, Output, OutputDelta, ScoredToken, scored
from moiety_engine.in_process.replica import SLICE_S, InProcessReplica
from moiety_engine.in_process.sampling_params import SamplingParams
from moiety_options.model_options import model_name
from moiety_text.chat import ChatTemplate
from moiety_text.conversation import ConversationEncoder
from moiety_text.errors import TextError
from moiety_wire.classes import BATCH
from moiety_wire.messages import Failed, FailureCode, Finished, Submit, Tokens
from moiety_wire.seeds import seed_of_choice

FULL_BATCHES = 2  # batches kept at the engine, so that no step waits for more requests
OWNER = "in-process"

Message = Mapping[str, Any]  # {"role": …, "content": …}, as in the chat template
Prompt = str | Sequence[int]


@dataclass(slots=True)
class _Answer:
    """One requested sequence and its output so far."""

    submit: Submit
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    end: Finished | Failed | None = None

    def take(self, message: Tokens | Finished | Failed) -> None:
        if isinstance(message, Tokens):
            self.token_ids += message.token_ids
            self.text.append(message.text)
            self.logprobs += message.logprobs or []
            return
        self.end = message
        if isinstance(message, Finished):
            self.text.append(message.text)

    def completion(self) -> Completion:
        end = self.end
        assert isinstance(end, Finished), "results are read after all requests have finished"
        wants = self.submit.sampling.num_logprobs is not None
        logprobs = scored(self.token_ids, self.logprobs) if wants else None
        text = "".join(self.text)
        return Completion(
            self.index, text, self.token_ids, end.reason.value, end.detail, end.num_cached_tokens, logprobs
        )

    def prompt_logprobs(self) -> list[ScoredToken] | None:
        found = self.end.prompt_logprobs if isinstance(self.end, Finished) else None
        return None if found is None else scored(self.submit.prompt_ids[1:], found)


class LLM:
    """A model in this process, until `close` or the end of its `with`. One thread at a time."""

    def __init__(
        self,
        model: str = "",
        *,
        on_load: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        `model` is a checkpoint folder or a hub id, "" the demo model.

        `options` are the fields of EngineConfig; `on_load` gets bytes read and total bytes. Raises EngineError.
        """
        known = set(EngineConfig.__struct_fields__) - {"model"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise InvalidConfig(f"{', '.join(unknown)}: unknown option; known options are {', '.join(sorted(known))}")
        fields = {"name": model_name(model)} | options | {"model": str(resolve_checkpoint(model))}
        if isinstance(draft_model := options.get("draft_model"), str) and draft_model:
            fields["draft_model"] = str(resolve_checkpoint(draft_model))
        try:
            config = msgspec.convert(fields, EngineConfig)
        except msgspec.ValidationError as exc:
            raise InvalidConfig(str(exc)) from exc
        self.replica = InProcessReplica(config, on_load=on_load)
        self.card = card = self.replica.card
        self._tokenizer = self.replica.tokenizer
        template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
        self._conversations = (
            None if template is None else ConversationEncoder(self._tokenizer, card.tokenizer_json, template)
        )
        self._open: dict[str, _Answer] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory. No request is possible afterwards."""
        self._open.clear()
        self.replica.close()

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Complete each prompt, a text or token ids; return the outputs in their order.

        `params` apply to all prompts, or there is one per prompt. Raises InvalidRequest where one cannot be served, and
        then none is.
        """
        given = _as_list(prompts)
        encoded = [self._encode(prompt) for prompt in given]
        return self._run([prompt if isinstance(prompt, str) else None for prompt in given], encoded, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Output]:
        """Answer one conversation, or each of several, with the model's chat template. Raises InvalidRequest."""
        several = cast(
            "list[Sequence[Message]]", [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        encoded = [self._encode_chat(conversation, tools) for conversation in several]
        return self._run([None] * len(encoded), encoded, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Complete one prompt; yield each answer's text as it is generated. Closing the iterator aborts the request."""
        answers = self._answers(self._encode(prompt), params or SamplingParams(), gathers=False)
        waiting = list(answers)
        try:
            while any(answer.end is None for answer in answers):
                messages = self._advance(waiting, at_most_s=0.0)
                waiting = []
                for answer, message in messages:
                    if isinstance(message, Failed):
                        raise _refusal(message)
                    if answer in answers:
                        yield _piece(answer, message)
        finally:
            self._drop(answers)

    # ── how it is answered ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Output]:
        given = params or SamplingParams()
        each = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"there are {len(prompts)} prompts and {len(each)} SamplingParams; give one for all, or "
                "one for each prompt"
            )
        answers = [self._answers(ids, one, gathers=True) for ids, one in zip(prompts, each, strict=True)]
        every = [answer for group in answers for answer in group]
        self._answer_all(every)
        return [
            Output(text, ids, [answer.completion() for answer in group], group[0].prompt_logprobs())
            for text, ids, group in zip(texts, prompts, answers, strict=True)
        ]

    def _answer_all(self, answers: Sequence[_Answer]) -> None:
        """Run all answers, the longest first, so that the batch stays full to the end."""
        waiting = sorted(answers, key=_predicted_tokens)
        try:
            while waiting or any(answer.end is None for answer in answers):
                num_free = FULL_BATCHES * self.replica.max_running - self.replica.num_open
                some = [waiting.pop() for _ in range(min(max(num_free, 0), len(waiting)))]
                for _, message in self._advance(some):
                    if isinstance(message, Failed):
                        raise _refusal(message)
        finally:
            self._drop(answers)

    def _advance(
        self, fresh: Sequence[_Answer], *, at_most_s: float = SLICE_S
    ) -> list[tuple[_Answer, Tokens | Finished | Failed]]:
        """Run the engine for a while; each message is added to its answer, whichever call waits for that answer."""
        self._open |= {answer.submit.request_id: answer for answer in fresh}
        found = []
        for message in self.replica.advance((answer.submit for answer in fresh), at_most_s=at_most_s):
            if isinstance(message, Tokens | Finished | Failed) and message.request_id in self._open:
                answer = self._open[message.request_id]
                answer.take(message)
                found.append((answer, message))
                if answer.end is not None:
                    del self._open[message.request_id]
        return found

    def _drop(self, answers: Sequence[_Answer]) -> None:
        """Abort the answers that have not ended."""
        for answer in answers:
            if self._open.pop(answer.submit.request_id, None) is not None:
                self.replica.abort(answer.submit.request_id)

    def _answers(self, prompt_ids: list[int], params: SamplingParams, *, gathers: bool) -> list[_Answer]:
        if params.n < 1:
            raise InvalidRequest(f"n must be at least 1, not {params.n}")
        left = max(1, self.card.max_context_tokens - len(prompt_ids))  # the engine refuses prompts that do not fit
        max_tokens = left if params.max_tokens is None else params.max_tokens
        return [
            _Answer(
                Submit(
                    request_id=str(next(self._numbers)),
                    seq=0,
                    model=self.card.model,
                    tenant_id=OWNER,
                    service=BATCH,
                    prompt_ids=prompt_ids,
                    sampling=params.sampling(seed_of_choice(params.seed, index), is_first=index == 0),
                    stopping=params.stopping(max_tokens),
                    credit_tokens=max_tokens,
                    cache_salt=OWNER.encode(),
                    arrival_unix_ns=time.time_ns(),
                    gathers=gathers,
                ),
                index,
            )
            for index in range(params.n)
        ]

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            return self._tokenizer.encode(prompt, add_special_tokens=True, max_tokens=self.card.max_context_tokens)
        except TextError as exc:
            raise InvalidRequest(str(exc)) from exc

    def _encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if self._conversations is None:
            raise InvalidRequest(f"{self.card.model} has no chat template; use generate with the whole prompt")
        try:
            return self._conversations.encode(messages, tools=tools, max_tokens=self.card.max_context_tokens)
        except TextError as exc:
            raise InvalidRequest(str(exc)) from exc


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: a text or a list of token ids is one prompt."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return cast("list[Prompt]", list(prompts))


def _piece(answer: _Answer, message: Tokens | Finished) -> OutputDelta:
    if isinstance(message, Tokens):
        return OutputDelta(answer.index, message.text, message.token_ids)
    return OutputDelta(answer.index, message.text, [], message.reason.value)


def _predicted_tokens(answer: _Answer) -> int:
    return len(answer.submit.prompt_ids) + answer.submit.stopping.max_tokens


def _refusal(failed: Failed) -> Exception:
    if failed.code in (FailureCode.ENGINE_FAILED, FailureCode.NON_FINITE):
        return EngineError(failed.message)
    return InvalidRequest(failed.message)
