"""Markers of calls and thoughts that are special tokens, which texts leave out otherwise: parsers see them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import fake_scheduler
from support.chat_outputs import NOTE, OUTPUTS, WEATHER, Output
from support.router_mesh import MODEL, RouterMesh, router_mesh
from support.tool_folder import tool_folder
from tokenizers import AddedToken, Tokenizer

from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.router.http.server.server import HttpServer
from radixmesh.daemons.runtime.model_folder.fingerprint import tokenizer_fingerprint

# Those of DeepSeek V3, Kimi K2, GPT-OSS and Mistral.
_MARKERS = {
    "deepseek_v3": r"<｜tool▁[^｜]*｜>",
    "deepseek_v31": r"<｜tool▁[^｜]*｜>",
    "kimi_k2": r"<\|tool_call[^|]*\|>",
    "gpt_oss": r"<\|\w+\|>",
    "mistral": r"\[(?:/?THINK|TOOL_CALLS|CALL_ID|ARGS)\]",
}
CASES = [output for output in OUTPUTS if output.parser in _MARKERS and not output.prompt]
TOOLS = [
    {"type": "function", "function": {"name": tool.name, "parameters": json.loads(tool.parameters)}}
    for tool in (WEATHER, NOTE)
]
EOS = 1


def special_folder(parent: Path, text: str, pattern: str) -> tuple[Path, list[int]]:
    """The tiny model's folder with the markers of a text as special tokens, and the text's ids."""
    folder = tool_folder(parent)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    found = sorted(set(re.findall(pattern, text)))
    assert found
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in found])
    tokenizer.save(str(path))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    # Texts without their markers are what a client got who read nothing of this.
    assert tokenizer.decode(ids) != text and tokenizer.decode(ids, skip_special_tokens=False).strip() == text.strip()
    return folder, ids


@asynccontextmanager
async def serving(folder: Path, output: Output) -> AsyncIterator[httpx.AsyncClient]:
    identity = type(MODEL)()
    identity.CopyFrom(MODEL)
    identity.tokenizer_fingerprint = tokenizer_fingerprint(folder)
    identity.vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    flags = {"tool_call_parser": output.parser, "reasoning_parser": output.thought, "http_listen": "127.0.0.1:0"}
    mesh = router_mesh(model=folder, identity=identity, **flags)
    async with mesh as running, httpx.AsyncClient(base_url=f"http://127.0.0.1:{_port(running)}", timeout=60) as http:
        yield http


@pytest.mark.parametrize("output", CASES, ids=lambda output: f"{output.parser}-{len(output.text)}")
async def test_calls_and_thoughts_behind_special_tokens_are_read(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids = special_folder(tmp_path, output.text, _MARKERS[output.parser])
    script = [*ids, EOS]
    monkeypatch.setattr(fake_scheduler, "made_up_token", lambda model, prompt, seed, index: script[index])
    body: dict[str, Any] = {"model": MODEL.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
    async with serving(folder, output) as http:
        answer = await http.post("/v1/chat/completions", json={**body, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        whole = answer.json()["choices"][0]["message"]
        calls = [
            (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in whole.get("tool_calls") or ()
        ]
        assert calls == list(output.calls)
        assert (whole["content"] or "").strip() == output.content.strip()
        assert (whole.get("reasoning_content") or "").strip() == output.reasoning.strip()


def _port(mesh: RouterMesh) -> int:
    daemon = mesh.routers[0].daemon
    assert isinstance(daemon, RouterDaemon) and isinstance(daemon.http, HttpServer)
    return daemon.http.port
