"""Types of OpenAI's items and tools in responses, used to generate the OpenAPI schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from moiety_platform.openai_api.answer_types import ChatTokenLogprob
from moiety_platform.openapi.schemas import either

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(TypedDict):
    """Text from the client."""

    type: Literal["input_text"]
    text: str


class OutputText(TypedDict):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)]
    logprobs: list[ChatTokenLogprob]


class ResponseMessage(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ResponseCall(TypedDict):
    """A function call for the client to execute. Its arguments are a JSON object as text."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[str]


class ThoughtText(TypedDict):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ResponseThought(TypedDict):
    """Reasoning of the model before its answer, without a summary, and encrypted only where `include` requests it."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: Annotated[list[Any], Meta(max_length=0)]
    content: list[ThoughtText]
    encrypted_content: NotRequired[str]


class InputMessage(TypedDict):
    """A message from the client."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["user", "system", "developer"]
    content: list[InputText]


class InputResult(TypedDict):
    """The result of a function call."""

    id: str
    type: Literal["function_call_output"]
    status: Status
    call_id: str
    output: str


class ResponseCustomCall(TypedDict):
    """A call of a custom tool for the client to execute. Its input is free text, or follows the tool's grammar."""

    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    input: str
    namespace: NotRequired[str]


class PatchOperation(TypedDict):
    """A change of one file. A deletion has no `diff`."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: NotRequired[str]


class ResponsePatchCall(TypedDict):
    """A change of a file for the client to make."""

    id: str
    type: Literal["apply_patch_call"]
    status: Status
    call_id: str
    operation: PatchOperation


class ShellCommands(TypedDict):
    """Commands for a shell, with limits for each."""

    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None


class ShellPlace(TypedDict):
    """Place where commands are executed: the client."""

    type: Literal["local"]


class ResponseShellCall(TypedDict):
    """Commands for the client to execute in a shell."""

    id: str
    type: Literal["shell_call"]
    status: Status
    call_id: str
    action: ShellCommands
    environment: ShellPlace


class LocalCommand(TypedDict):
    """One command, as its program and arguments."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    timeout_ms: int | None
    user: str | None
    working_directory: str | None


class ResponseLocalShellCall(TypedDict):
    """A command for the client to execute."""

    id: str
    type: Literal["local_shell_call"]
    status: Status
    call_id: str
    action: LocalCommand


class ResponseSearchCall(TypedDict):
    """A search for tools for the client to make."""

    id: str
    type: Literal["tool_search_call"]
    status: Status
    call_id: str
    execution: Literal["client"]
    arguments: dict[str, Any]


class ResponseCompaction(TypedDict):
    """The summary of a conversation, encrypted."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


class InputCustomResult(TypedDict):
    """The result of a custom tool, or of a command of a local shell."""

    id: str
    type: Literal["custom_tool_call_output", "local_shell_call_output"]
    status: Status
    call_id: str
    output: str


class InputPatchResult(TypedDict):
    """Result of a change of a file."""

    id: str
    type: Literal["apply_patch_call_output"]
    status: Literal["completed", "failed"]
    call_id: str
    output: str | None


class ShellEnd(TypedDict):
    """End of a command."""

    type: Literal["exit", "timeout"]
    exit_code: NotRequired[int]


class ShellOutputs(TypedDict):
    """Output of a command."""

    stdout: str
    stderr: str
    outcome: ShellEnd


class InputShellResult(TypedDict):
    """The output of commands."""

    id: str
    type: Literal["shell_call_output"]
    status: Status
    call_id: str
    output: list[ShellOutputs]
    max_output_length: int | None


class InputSearchResult(TypedDict):
    """The tools that a client found."""

    id: str
    type: Literal["tool_search_output"]
    status: Status
    call_id: str
    execution: Literal["client"]
    tools: list[dict[str, Any]]


class InputTools(TypedDict):
    """Tools that are offered from here on beside those of a request."""

    id: str
    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: list[dict[str, Any]]


OutputItem = Annotated[
    Any,
    either(
        ResponseMessage,
        ResponseThought,
        ResponseCall,
        ResponseCustomCall,
        ResponsePatchCall,
        ResponseShellCall,
        ResponseLocalShellCall,
        ResponseSearchCall,
        ResponseCompaction,
    ),
]
InputItem = Annotated[
    Any,
    either(
        InputMessage,
        ResponseMessage,
        ResponseThought,
        ResponseCall,
        InputResult,
        ResponseCustomCall,
        InputCustomResult,
        ResponsePatchCall,
        InputPatchResult,
        ResponseShellCall,
        InputShellResult,
        ResponseLocalShellCall,
        ResponseSearchCall,
        InputSearchResult,
        InputTools,
        ResponseCompaction,
    ),
]


class ResponseFunction(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class CustomFormat(TypedDict):
    """Format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: NotRequired[Literal["lark", "regex"]]
    definition: NotRequired[str]


class ResponseCustomTool(TypedDict):
    """A tool with free text as its input."""

    type: Literal["custom"]
    name: str
    description: NotRequired[str]
    format: NotRequired[CustomFormat]


class ResponseNamespace(TypedDict):
    """Tools of one namespace."""

    type: Literal["namespace"]
    name: str
    description: str
    tools: list[Annotated[Any, either(ResponseFunction, ResponseCustomTool)]]


class ResponseBuiltIn(TypedDict):
    """A tool that the API defines, and whose calls the client executes."""

    type: Literal["apply_patch", "local_shell", "shell", "tool_search"]


OfferedToolFields = Annotated[Any, either(ResponseFunction, ResponseCustomTool, ResponseNamespace, ResponseBuiltIn)]


class ResponseChosen(TypedDict):
    """The tool that the model must call, or the tools that it may call."""

    type: str
