"""The clients of other people that are tested against a mesh, and the table of them in docs/clients.md.

`python tests/support/client_list.py docs/clients.md` writes the table from the last whole run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Takes a client that passed: its name, its version, the seconds that it took, and its checks.
Record = Callable[[str, str, float, set[str]], None]
ROOT = Path(__file__).resolve().parents[2]
OUTCOME = ROOT / "tests" / "clients" / "outcome.json"
CHECKS = ("text", "streams", "structured", "tools", "embeddings", "errors", "load", "evaluation")
_BEGIN, _END = "| client |", "\n\n"
_LIBRARIES = "tests/clients/scripts/"
_TOOLS = "tests/clients/test_load_tools.py"


class ListedClient(NamedTuple):
    """packages: what is installed for it; the first one's version is told. code: what runs against the mesh."""

    title: str
    packages: tuple[str, ...]
    checks: tuple[str, ...]
    code: str


def _library(title: str, script: str, *packages: str, without: str = "") -> ListedClient:
    checks = tuple(check for check in CHECKS[:6] if check not in without.split())
    return ListedClient(title, packages, checks, _LIBRARIES + script)


CLIENTS: dict[str, ListedClient] = {
    "openai": _library("OpenAI, Python", "openai_client.py", "openai"),
    "openai_node": _library("OpenAI, Node", "openai_node.mjs", "openai"),
    "vercel": _library("Vercel AI SDK", "vercel.mjs", "ai", "@ai-sdk/openai-compatible"),
    "langchain": _library("LangChain", "langchain_client.py", "langchain-openai"),
    # Without the bound a resolver goes back to a version of 2024 rather than to an older openai, and that one finds no
    # module of its own.
    "llamaindex": _library(
        "LlamaIndex", "llamaindex_client.py", "llama-index-llms-openai-like>=0.8.1", without="embeddings errors"
    ),
    # It imports mcp where a request has tools, and does not bring it.
    "litellm": _library("litellm", "litellm_client.py", "litellm", "mcp"),
    "instructor": _library("instructor", "instructor_client.py", "instructor", without="embeddings errors"),
    "anthropic": _library("Anthropic SDK", "anthropic_client.py", "anthropic", without="embeddings"),
    "ollama": _library("Ollama, Python", "ollama_client.py", "ollama", without="embeddings"),
    "reflection": _library("gRPC by reflection alone", "reflection_client.py", "grpcio", without="tools embeddings"),
    "sglang": ListedClient("`sglang.bench_serving`", ("sglang",), ("load",), _TOOLS),
    "guidellm": ListedClient("guidellm", ("guidellm",), ("load",), _TOOLS),
    "aiperf": ListedClient("aiperf", ("aiperf",), ("load",), _TOOLS),
    "locust": ListedClient("locust", ("locust",), ("load",), "tests/clients/scripts/locustfile.py"),
    "lm_eval": ListedClient("lm-eval", ("lm-eval[api]", "transformers"), ("evaluation",), _TOOLS),
}


def checked(output: str) -> set[str]:
    """The checks that a client's script says it has passed."""
    return {word for line in re.findall(r"^checked (.*)$", output, re.MULTILINE) for word in line.split()}


def table() -> str:
    """The clients, the versions of the last run of all, and what was checked of each."""
    outcome = json.loads(OUTCOME.read_text())
    lines = ["| client | version | checked | seconds | code |", "|---|---|---|---|---|"]
    for name, client in CLIENTS.items():
        told = outcome[name]
        lines.append(
            f"| {client.title} | {told['version']} | {', '.join(told['checked'])} | {max(1, round(told['seconds']))} | "
            f"`{client.code}` |"
        )
    return "\n".join(lines)


def in_page(page: str) -> str:
    """The page with the present table."""
    start = page.index(_BEGIN)
    return page[:start] + table() + page[page.index(_END, start) :]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(in_page(path.read_text()))
