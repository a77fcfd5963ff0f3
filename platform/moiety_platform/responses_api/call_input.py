"""Calls of earlier answers and their results, as items of `input` in OpenAI's fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody
from moiety_platform.inference.tool_fields import ArgumentsObject, ArgumentsText, ToolName, arguments_text
from moiety_platform.responses_api.calls import MAX_INT
from moiety_platform.responses_api.content import INPUT_TEXT, ContentParts, stored_output, stored_parts
from moiety_platform.responses_api.items import (
    CALL,
    CUSTOM_CALL,
    CUSTOM_RESULT,
    LOCAL_SHELL_CALL,
    LOCAL_SHELL_RESULT,
    MESSAGE,
    PATCH_CALL,
    PATCH_RESULT,
    RESULT,
    SEARCH_CALL,
    SEARCH_RESULT,
    SHELL_CALL,
    SHELL_RESULT,
    Item,
    call_item,
    custom_call_item,
    result_item,
)
from moiety_platform.responses_api.tools import ResponseTools

_CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Number = Annotated[int, Field(ge=0, le=MAX_INT)] | None
_Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PARTS)]


class CallItem(StrictBody):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: _CallId
    name: ToolName
    arguments: ArgumentsText
    namespace: ToolName | None = None

    def checked(self) -> Item:
        return call_item(self.call_id, self.name, arguments_text(self.arguments), self.namespace)


class ResultItem(StrictBody):
    """The result of a function call, or a result that comes without a call."""

    type: Literal["function_call_output"]
    call_id: _CallId | None = None
    name: str | None = None
    output: ContentParts

    def checked(self) -> Item:
        if self.call_id is not None:
            return result_item(RESULT, self.call_id, output=stored_output(self.output))
        head = f"Output of the tool {self.name}:" if self.name else "Output of a tool:"
        content = [{"type": INPUT_TEXT, "text": head}, *stored_parts(self.output)]
        return {"type": MESSAGE, "status": "completed", "role": "user", "content": content}


class CustomCallItem(StrictBody):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: _CallId
    name: ToolName
    input: str
    namespace: ToolName | None = None

    def checked(self) -> Item:
        return custom_call_item(self.call_id, self.name, self.input, self.namespace)


class CustomResultItem(StrictBody):
    """The result of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: _CallId
    output: ContentParts

    def checked(self) -> Item:
        return result_item(CUSTOM_RESULT, self.call_id, output=stored_output(self.output))


class PatchWrite(StrictBody):
    type: Literal["create_file", "update_file"]
    path: str
    diff: str


class PatchDeletion(StrictBody):
    type: Literal["delete_file"]
    path: str


class PatchCallItem(StrictBody):
    """A patch of one file."""

    type: Literal["apply_patch_call"]
    call_id: _CallId
    operation: Annotated[PatchWrite | PatchDeletion, Field(discriminator="type")]

    def checked(self) -> Item:
        operation = self.operation.model_dump(mode="json")
        return {"type": PATCH_CALL, "status": "completed", "call_id": self.call_id, "operation": operation}


class PatchResultItem(StrictBody):
    """Result of a patch: applied or not."""

    type: Literal["apply_patch_call_output"]
    call_id: _CallId
    status: Literal["completed", "failed"]
    output: str | None = None

    def checked(self) -> Item:
        return {**result_item(PATCH_RESULT, self.call_id, output=self.output), "status": self.status}


class ShellAction(StrictBody):
    commands: _Texts
    timeout_ms: _Number = None
    max_output_length: _Number = None


class ShellCallItem(StrictBody):
    """Commands for a shell."""

    type: Literal["shell_call"]
    call_id: _CallId
    action: ShellAction

    def checked(self) -> Item:
        fields = {"action": self.action.model_dump(mode="json"), "environment": {"type": "local"}}
        return {"type": SHELL_CALL, "status": "completed", "call_id": self.call_id, **fields}


class ShellOutcome(StrictBody):
    type: Literal["exit", "timeout"]
    exit_code: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None

    def checked(self) -> Item:
        return {"type": "timeout"} if self.type == "timeout" else {"type": "exit", "exit_code": self.exit_code or 0}


class ShellOutput(StrictBody):
    """Output of one command."""

    outcome: ShellOutcome
    stdout: str
    stderr: str


class ShellResultItem(StrictBody):
    """Output of the commands of a shell call."""

    type: Literal["shell_call_output"]
    call_id: _CallId
    output: Annotated[list[ShellOutput], Field(fail_fast=True, max_length=MAX_PARTS)]
    max_output_length: _Number = None

    def checked(self) -> Item:
        output = [{"stdout": one.stdout, "stderr": one.stderr, "outcome": one.outcome.checked()} for one in self.output]
        return result_item(SHELL_RESULT, self.call_id, output=output, max_output_length=self.max_output_length)


class LocalShellAction(StrictBody):
    type: Literal["exec"]
    command: _Texts
    env: Annotated[dict[str, str], Field(max_length=MAX_PARTS)] | None = None
    timeout_ms: _Number = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(StrictBody):
    """A command for the client's own shell."""

    type: Literal["local_shell_call"]
    call_id: _CallId
    action: LocalShellAction

    def checked(self) -> Item:
        action = {**self.action.model_dump(mode="json"), "env": self.action.env or {}}
        return {"type": LOCAL_SHELL_CALL, "status": "completed", "call_id": self.call_id, "action": action}


class LocalShellResultItem(StrictBody):
    """Output of a local shell call, which `call_id` or, as in OpenAI's types, `id` names."""

    type: Literal["local_shell_call_output"]
    id: _CallId
    call_id: _CallId | None = None
    output: str

    def checked(self) -> Item:
        return result_item(LOCAL_SHELL_RESULT, self.call_id or self.id, output=self.output)


class SearchCallItem(StrictBody):
    """A search for tools. One without `call_id` was executed by another server, and is skipped."""

    type: Literal["tool_search_call"]
    call_id: _CallId | None = None
    arguments: ArgumentsObject

    def checked(self) -> Item | None:
        if self.call_id is None:
            return None
        fields = {"execution": "client", "arguments": self.arguments}
        return {"type": SEARCH_CALL, "status": "completed", "call_id": self.call_id, **fields}


class SearchResultItem(StrictBody):
    """The tools that a client has found. They are offered beside those in `tools`."""

    type: Literal["tool_search_output"]
    call_id: _CallId | None = None
    tools: ResponseTools

    def checked(self) -> Item | None:
        if self.call_id is None:
            return None
        tools = [tool.fields() for tool in self.tools]
        return result_item(SEARCH_RESULT, self.call_id, execution="client", tools=tools)


CallInput = (
    CallItem
    | ResultItem
    | CustomCallItem
    | CustomResultItem
    | PatchCallItem
    | PatchResultItem
    | ShellCallItem
    | ShellResultItem
    | LocalShellCallItem
    | LocalShellResultItem
    | SearchCallItem
    | SearchResultItem
)

CALL_ITEMS: Mapping[str, type[CallInput]] = MappingProxyType(
    {
        CALL: CallItem,
        RESULT: ResultItem,
        CUSTOM_CALL: CustomCallItem,
        CUSTOM_RESULT: CustomResultItem,
        PATCH_CALL: PatchCallItem,
        PATCH_RESULT: PatchResultItem,
        SHELL_CALL: ShellCallItem,
        SHELL_RESULT: ShellResultItem,
        LOCAL_SHELL_CALL: LocalShellCallItem,
        LOCAL_SHELL_RESULT: LocalShellResultItem,
        SEARCH_CALL: SearchCallItem,
        SEARCH_RESULT: SearchResultItem,
    }
)
"""Models of the items by type."""
