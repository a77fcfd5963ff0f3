"""The clients of the matrix, the tasks, and the server that each task needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

HERE = Path(__file__).parent
TASKS = ("chat", "stream", "tools", "structured output", "thoughts", "images", "long prompt", "cancel")


class ServerKind(StrEnum):
    """Model of a gateway: the demo model, or a scripted one for a task that needs a capable model or a long answer."""

    DEMO = "demo"
    SCRIPTED = "scripted"
    ENDLESS = "endless"


SERVERS = {
    **dict.fromkeys(TASKS, ServerKind.DEMO),
    **dict.fromkeys(("tools", "thoughts", "images"), ServerKind.SCRIPTED),
}


@dataclass(frozen=True, slots=True)
class Client:
    """Client that one script runs. `environment`: requirements file of its packages, or folder of its Node packages.

    `package` names the package whose version is reported. `servers` holds the tasks that differ from SERVERS.
    """

    name: str
    script: str
    environment: str
    package: str
    servers: dict[str, ServerKind] = field(default_factory=dict)

    def server_of(self, task: str) -> ServerKind:
        return self.servers.get(task, SERVERS[task])


AGENT = {  # whose prompts exceed the demo model's context
    **dict.fromkeys(TASKS, ServerKind.SCRIPTED),
    "cancel": ServerKind.ENDLESS,
}
TOOL_USERS = {"structured output": ServerKind.SCRIPTED}  # clients that ask for documents by a tool call
REFUSES_EMPTY = {"long prompt": ServerKind.SCRIPTED}  # clients that ask again where the demo model says nothing
CLIENTS = (
    Client("openai (Python)", "python/openai_sdk.py", "vendors", "openai"),
    Client("openai (Node)", "node/openai_sdk.mjs", "node", "openai"),
    Client("anthropic (Python)", "python/anthropic_sdk.py", "vendors", "anthropic"),
    Client("anthropic (Node)", "node/anthropic_sdk.mjs", "node", "@anthropic-ai/sdk"),
    Client("Vercel AI SDK", "node/ai_sdk.mjs", "node", "ai", TOOL_USERS),
    Client("LangChain", "python/langchain_client.py", "langchain", "langchain-openai", TOOL_USERS),
    Client("LangGraph", "python/langgraph_client.py", "langchain", "langgraph", TOOL_USERS),
    Client("LlamaIndex", "python/llama_index_client.py", "llama_index", "llama-index-core"),
    Client("pydantic-ai", "python/pydantic_ai_client.py", "agents", "pydantic-ai-slim", TOOL_USERS | REFUSES_EMPTY),
    Client("instructor", "python/instructor_client.py", "instructor", "instructor", TOOL_USERS | REFUSES_EMPTY),
    Client("smolagents", "python/smolagents_client.py", "litellm", "smolagents"),
    Client("OpenAI Agents", "python/openai_agents_client.py", "agents", "openai-agents"),
    Client("litellm", "python/litellm_client.py", "litellm", "litellm", TOOL_USERS),
    Client("inspect-ai", "python/inspect_client.py", "inspect", "inspect-ai"),
    Client("lm_eval", "python/lm_eval_client.py", "evaluation", "lm-eval"),
    Client("guidellm", "python/guidellm_client.py", "evaluation", "guidellm"),
    Client("aider", "agents/aider_agent.py", "aider", "aider-chat", AGENT),
    Client("Claude Code", "agents/claude_code_agent.py", "node", "@anthropic-ai/claude-code", AGENT),
    Client("Codex CLI", "agents/codex_agent.py", "node", "@openai/codex", AGENT),
    Client("Cline CLI", "agents/cline_agent.py", "cline", "cline", AGENT),
    Client("OpenCode", "agents/opencode_agent.py", "node", "opencode-ai", AGENT),
)
