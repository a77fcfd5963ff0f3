"""Tool-call format of one model: its markers, the opening of a forced call, and the messages its template takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moiety_text.tools.history import ArgumentsForm, CallIds, adapted_messages
from moiety_text.tools.offer import ToolOffer
from moiety_text.tools.reader import CallReader

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opening:
    """Beginning of an answer that must call, in the model's format, with the client's `name` of the tool."""

    before: str = ""
    name: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        return self.before + self.name + self.after


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """Tags around the parameters of a call whose arguments are not a JSON object.

    `padding` stands around each value. Where the tag says whether a value is a string, `to_json` differs from
    `to_value`. `has_free_text`: a value of text is written as it is.
    """

    to_name: str
    to_value: str
    to_json: str
    end: str
    between: str = ""  # after each parameter
    padding: str = ""


@dataclass(frozen=True, slots=True)
class NotedArguments:
    """Arguments in a notation that is neither a JSON object nor tags around parameters.

    `notation` is `keywords` (Python's keyword arguments), `members` (members without quotes, with `mark` around texts)
    or `elements` (nested elements, with `mark` before each tag).
    """

    notation: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class CallIdText:
    """Id that the model writes itself between the name and the arguments; `pattern` is a regular expression."""

    opener: str
    pattern: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call format of one model.

    `markers` mark its calls and may be special tokens. An answer that must call begins with `to_name` before the name
    and `name_end` and `to_arguments` after it.
    """

    reader: type[CallReader]
    markers: tuple[str, ...]
    to_name: str
    to_arguments: str
    to_end: str  # text after the arguments
    between: str | None = None  # from the end of a call to the name of the next; None: each call has its own marker
    closer: str = ""  # after the last of those calls
    marks_calls: bool = True  # otherwise a call is the whole answer, and recognized by its format
    name_end: str = ""  # directly after the name, such as the number of the call
    name_end_pattern: str = ""  # regular expression of `name_end`
    call_id: CallIdText | None = None  # before `to_arguments`, which then is not part of an opening
    parameters: ParameterTags | NotedArguments | None = None  # None: the arguments are a JSON object
    call_ids: CallIds = CallIds.CLIENT
    one_call_a_message: bool = False
    results_in_calls: bool = False  # the template reads results from the message with the calls
    arguments: ArgumentsForm = ArgumentsForm.OBJECT  # that the template renders

    @property
    def opener(self) -> str:
        """Return the marker before the calls; "" where a call is the whole answer."""
        return self.reader.opener if self.marks_calls else ""

    def opening(self, offer: ToolOffer) -> Opening:
        """Return the opening of an answer; empty where the model is free to call or not."""
        if not offer.must_call:
            return Opening()
        name = offer.first_call
        if name is None:
            return Opening(self.to_name)
        return Opening(self.to_name, name, self.name_end + (self.to_arguments if self.call_id is None else ""))

    def new_reader(self, offer: ToolOffer, *, is_rest: bool) -> CallReader:
        """Return a reader for an answer to a prompt that ends with the opening.

        `is_rest`: the client has begun the answer.
        """
        reader = self.reader(offer.names, offer.max_calls, is_rest=is_rest, schemas=offer.schemas)
        deltas = reader.feed(self.opening(offer).text)
        assert not deltas, "an opening ends before the name and the arguments of a call"
        return reader

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in this template's form: results with their tool's name, ids and calls in its format."""
        return adapted_messages(
            messages,
            self.call_ids,
            one_call_a_message=self.one_call_a_message,
            results_in_calls=self.results_in_calls,
            arguments=self.arguments,
        )


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """A tool-call format by name. `is_of` returns whether a chat template is of the family."""

    name: str
    is_of: Callable[[str], bool]
    format_of: Callable[[str], ToolFormat]  # the format of a template, which may be of another family
