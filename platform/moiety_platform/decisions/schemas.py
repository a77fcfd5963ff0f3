"""The body of `/v1/decisions`: OpenAI's fields, strictly typed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import StringConstraints
from pydantic_core import PydanticCustomError

from moiety_platform.decisions.input_items import DecisionItems, input_text, problems_of_calls
from moiety_platform.decisions.questions import Questions, prompts_of
from moiety_platform.inference.body_fields import InferenceBody, ModelName, refuse
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.openai_api.request_options import CACHE_TTL_S, PromptCacheOptions
from moiety_wire.messages import Sampling

MAX_OPTIONS = 2048  # of all questions of a request, each of which is one sequence
MAX_INPUT_CHARS = 1 << 24  # of the input, counted once for each question

_EndUser = Annotated[str, StringConstraints(max_length=512)]


class DecisionBody(InferenceBody):
    """`POST /v1/decisions`. null means the default."""

    model: ModelName
    input: DecisionItems
    questions: Questions
    prompt_cache_key: Annotated[
        _EndUser | None, ignored("Prefixes are cached without a key, separately for each tenant.")
    ] = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: _EndUser | None = None

    def problems(self) -> Iterator[PydanticCustomError]:
        yield from problems_of_calls(self.input)
        num_options = sum(self.option_counts)
        if num_options > MAX_OPTIONS:
            yield refuse(
                f"'questions' have {num_options:,} options together; a request may have {MAX_OPTIONS:,}. Send the "
                "questions in several requests"
            )
        num_chars = len(self.questions) * len(input_text(self.input))
        if num_chars > MAX_INPUT_CHARS:
            yield refuse(
                f"'input' has {num_chars:,} characters, counted once for each of {len(self.questions)} questions; a "
                f"request may have {MAX_INPUT_CHARS:,}. Send fewer questions in one request, or a shorter input"
            )

    @property
    def option_counts(self) -> tuple[int, ...]:
        """Number of options of each question."""
        return tuple(len(question.options) for question in self.questions)

    def generation(self) -> Generation:
        """Return the generation: one prompt for each option, which ends with the option as the model's answer."""
        options = self.prompt_cache_options
        return Generation(
            model=self.model,
            prompts=tuple(
                Conversation(({"role": "user", "content": message},), prefill=option, thinks=False)
                for message, option in prompts_of(input_text(self.input), self.questions)
            ),
            num_choices=1,
            sampling=Sampling(temperature=0.0, num_prompt_logprobs=0),
            max_tokens=1,  # an engine generates at least one, of which nothing is used
            option_counts=self.option_counts,
            keep_s=0.0 if options is None or options.ttl is None else CACHE_TTL_S[options.ttl],
            prompt_field="input",
        )
