"""What is asked of the engines, free of any API's field names. Made by the schemas, carried out by the pipeline."""

from __future__ import annotations

from typing import Any

import msgspec

from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import Sampling


class Conversation(msgspec.Struct, frozen=True):
    """Messages for the model's chat template, each with `role` and text `content`. An assistant's may have a
    `reasoning_content`, which is what it thought, and `tool_calls`, each an `id` and a `function` of `name` and
    `arguments` (an object); a tool's has the `tool_call_id`.

    The answer to them begins with `prefill`, and only the rest of it is generated. It may call what `tools` offers."""

    messages: tuple[dict[str, Any], ...]
    prefill: str = ""
    tools: ToolOffer | None = None
    thinks: bool | None = None  # whether the model is to think before it answers; None: as its template has it
    effort: str | None = None  # how much it is to think, in OpenAI's words; "none": not at all
    template_options: dict[str, Any] = {}  # further variables of the chat template, in the client's words


Prompt = Conversation | str | tuple[int, ...]


class Generation(msgspec.Struct, frozen=True):
    """`num_choices` answers to each prompt; choice i of prompt p has index p · num_choices + i.
    `max_tokens` None means `default_max_tokens` or less, as the model's context leaves it, 0 that nothing is generated:
    see `embed`."""

    model: str
    prompts: tuple[Prompt, ...]
    num_choices: int
    sampling: Sampling
    max_tokens: int | None
    default_max_tokens: int | None = None  # without `max_tokens`; None for all that the context leaves
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    service_tier: str | None = None  # OpenAI's word for the class that is wanted
    embed: bool = False  # each prompt's vector is wanted, and no token: `max_tokens` is 0
    dimensions: int | None = None  # how many numbers of each vector are wanted; None for all
    max_numbers: int | None = None  # of all vectors together; None for as many as there are
    guide: GrammarSpec | None = None  # what each answer must be
    keep_s: float = 0.0  # for which the conversation may come back, and its prefix is kept
    echo: bool = False  # each prompt's text is wanted in front of its answers
    prompt_field: str = "prompt"  # where the client wrote the prompts, for complaints about them

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices
