"""Guided decoding through the whole mesh over HTTP, with the CPU worker and the tiny model: conformance, kills, bombs.

    python bench/guided_mesh.py conformance --generated 440 --store 220 > bench/results/guided-mesh.json
    python bench/guided_mesh.py kills --rounds 10 > bench/results/guided-kills.json
    python bench/guided_mesh.py bombs > bench/results/guided-bombs.json

conformance: texts of each schema at temperature 1 until one ends by itself, which is held against jsonschema; schemas
whose texts all ended by their length are named, and so are those that are refused, by reason. kills: each daemon dies
once a round while guided outputs, n = 2 and tool calls run; "equal" counts the answers that are the bytes of an
undisturbed run. bombs: milliseconds between the tokens of free streams beside an ambiguous grammar, whose masks take
ever longer, beside grammars that take ever longer to compile, and without them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from guided_conformance import reason  # noqa: E402
from support.conformance.checks import misfit  # noqa: E402
from support.conformance.real_schemas import store_schemas, tool_schemas  # noqa: E402
from support.conformance.schema_generator import SchemaGenerator  # noqa: E402
from support.http import http_address  # noqa: E402
from support.mesh import SERVICES, Mesh, running_mesh  # noqa: E402
from support.tool_folder import tool_folder  # noqa: E402

NAME = "tiny-llama"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "note": {"type": "string", "pattern": "^[a-f]{40}$"}},
    "required": ["city", "note"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "recite", "parameters": CITY}}
# Each "a" may be either alternative: the parses double, and a mask looks at them all.
MASK_BOMB = 'root ::= s\ns ::= "a" | s s | s s s'


async def conformance(options: argparse.Namespace) -> dict[str, object]:
    schemas = _schemas(options)
    counts: Counter[str] = Counter()
    refused: dict[str, list[str]] = {}
    wrong: list[str] = []
    unfinished: list[str] = []
    turns = asyncio.Semaphore(options.streams)
    async with running_mesh("cpu") as mesh, _http(mesh) as http:

        async def one(label: str, schema: object) -> None:
            text_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body = {"model": NAME, "prompt": "JSON:", "temperature": 1.0, "max_tokens": options.tokens}
            for seed in range(options.texts):
                async with turns:
                    asked = {**body, "seed": seed, "response_format": text_format}
                    answer = await http.post("/v1/completions", json=asked)
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    refused.setdefault(f"{error['code']}: {reason(error['message'])}", []).append(label)
                    return
                counts["texts"] += 1
                choice = answer.json()["choices"][0]
                if choice["finish_reason"] == "stop":
                    if why := misfit(schema, choice["text"].encode()):
                        wrong.append(f"{label}: {choice['text'][:200]} ({why[:100]})")
                    counts["finished"] += 1
                    return
            unfinished.append(label)

        await asyncio.gather(*(one(*item) for item in schemas.items()))
        bugs = list(mesh.bugs)
    num_refused = sum(map(len, refused.values()))
    by_reason = dict(sorted(refused.items(), key=lambda pair: -len(pair[1])))
    totals = {"schemas": len(schemas), "compiled": len(schemas) - num_refused, **counts, "refused": num_refused}
    return {**totals, "wrong": wrong, "bugs": bugs, "unfinished": sorted(unfinished), "refused_by_reason": by_reason}


def _schemas(options: argparse.Namespace) -> dict[str, object]:
    schemas: dict[str, object] = {f"seed {seed}": SchemaGenerator(seed).schema() for seed in range(options.generated)}
    schemas |= dict(list(tool_schemas().items())[: options.tools])
    if options.store:
        with tempfile.TemporaryDirectory() as folder:
            real = sorted(store_schemas(Path(folder)).items(), key=lambda pair: len(json.dumps(pair[1])))
        schemas |= dict(real[: options.store])
    return schemas


async def kills(options: argparse.Namespace) -> dict[str, object]:
    base = {"model": NAME, "temperature": 1.0, "max_tokens": 400}
    guided = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}
    calls = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "enable_thinking": False}
    chat = [{"role": "user", "content": "A city?"}]
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**base, **guided, "prompt": "JSON:", "n": 2, "seed": 1, "request_id": "guided-1"}),
        ("/v1/completions", {**base, **guided, "prompt": "A city:", "seed": 2, "request_id": "guided-2"}),
        ("/v1/chat/completions", {**base, **calls, "messages": chat, "seed": 3, "request_id": "tools-3"}),
        ("/v1/chat/completions", {**base, **calls, "messages": chat, "n": 2, "seed": 4, "request_id": "tools-4"}),
    ]
    counts: Counter[str] = Counter()
    retries: Counter[str] = Counter()
    slowest: dict[str, float] = dict.fromkeys(SERVICES, 0.0)
    with tempfile.TemporaryDirectory() as name:
        async with running_mesh("cpu", folder=tool_folder(Path(name))) as mesh, _http(mesh) as http:
            expected = [await _asked(http, *ask, False, retries) for ask in asks]
            for _ in range(options.rounds):
                for service in SERVICES:
                    began = time.monotonic()
                    running = [asyncio.create_task(_asked(http, *ask, service == "router", retries)) for ask in asks]
                    await asyncio.sleep(options.rng.uniform(0.05, 0.6))
                    counts["kills"] += mesh.cluster.kill(service)
                    for task, want in zip(running, expected, strict=True):
                        got = await task
                        counts["outputs"] += len(got)
                        counts["equal"] += sum(one == other for one, other in zip(got, want, strict=True))
                        counts["valid"] += sum(_is_valid(one) for one in got)
                    slowest[service] = round(max(slowest[service], time.monotonic() - began), 2)
                    await mesh.cluster.wait_healthy(60)
            bugs = list(mesh.bugs)
    return {"rounds": options.rounds, **counts, "slowest_s": slowest, "retries_of_clients": retries, "bugs": bugs}


async def _asked(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], may_break: bool, retries: Counter[str]
) -> list[str]:
    """Texts, or arguments of calls, of a streamed answer by index. may_break: the router is killed, whose clients ask
    again under the same name and seed."""
    while True:
        texts = [""] * body.get("n", 1)
        try:
            async with http.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.status_code != 200 and not may_break:
                    raise RuntimeError((await answer.aread()).decode())
                is_done = False
                async for line in answer.aiter_lines():
                    is_done |= line == "data: [DONE]"
                    for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                        parts = choice.get("delta", {}).get("tool_calls") or []
                        texts[choice["index"]] += choice.get("text") or "".join(
                            part["function"].get("arguments") or "" for part in parts
                        )
            if is_done:
                return texts
        except (httpx.TransportError, KeyError, json.JSONDecodeError) as error:
            if not may_break:
                raise
            retries[type(error).__name__] += 1
        if not may_break:
            raise RuntimeError("the stream ended early")
        await asyncio.sleep(0.1)


def _is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), CITY)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def bombs(options: argparse.Namespace) -> dict[str, object]:
    """Free streams of `options.tokens` tokens each: alone, beside grammars whose masks take ever longer, and beside
    grammars that take ever longer to compile."""
    async with running_mesh("cpu") as mesh, _http(mesh) as http:
        free = {"model": NAME, "prompt": "Once", "max_tokens": options.tokens, "ignore_eos": True, "stream": True}
        result: dict[str, object] = {"bystanders": options.streams, "tokens": options.tokens}

        async def bystanders() -> dict[str, float]:
            gaps = await asyncio.gather(*(_gaps(http, {**free, "seed": seed}) for seed in range(options.streams)))
            times = np.concatenate(gaps) * 1e3
            return {f"p{q}_ms": round(float(np.percentile(times, q)), 2) for q in (50, 99, 100)}

        await bystanders()
        before = await bystanders()
        mask_bomb = {"model": NAME, "prompt": "a", "max_tokens": 1500, "ebnf": MASK_BOMB, "min_tokens": 1500}
        ended: list[float] = []

        async def bombs_in_turn() -> None:
            while True:  # One that has ended is followed by the next: as many run all the time.
                began = time.monotonic()
                await http.post("/v1/completions", json=mask_bomb, timeout=None)
                ended.append(round(time.monotonic() - began, 2))

        running = [asyncio.create_task(bombs_in_turn()) for _ in range(2)]
        await asyncio.sleep(options.ahead_s)
        result["beside_masks"] = beside_masks = await bystanders()
        result["mask_bombs_running"] = sum(not task.done() for task in running)
        result["mask_bombs_ended_s"] = ended
        for task in running:
            task.cancel()
        answers: dict[str, list[object]] = {}
        compiling = asyncio.create_task(_compile_bombs(http, answers))
        result["beside_compilations"] = beside_compilations = await bystanders()
        result["compile_bombs_ahead"] = not compiling.done()
        await compiling
        after = await bystanders()
        quiet = max(before["p99_ms"], after["p99_ms"])
        result |= {"quiet_before": before, "quiet_after": after, "answers": answers}
        for name, beside in (("masks", beside_masks), ("compilations", beside_compilations)):
            result[f"p99_ratio_{name}"] = round(beside["p99_ms"] / quiet, 2)
    return result


async def _compile_bombs(http: httpx.AsyncClient, answers: dict[str, list[object]]) -> None:
    """answers: status, code, limit that was met, and seconds, by name; two at a time."""
    turns = asyncio.Semaphore(2)

    async def one(name: str, fields: dict[str, object]) -> None:
        body = {"model": NAME, "prompt": "a", "max_tokens": 4, **fields}
        async with turns:
            began = time.monotonic()
            answer = await http.post("/v1/completions", json=body, timeout=None)
            seconds = round(time.monotonic() - began, 2)
        error = answer.json().get("error", {})
        answers[name] = [answer.status_code, error.get("code", ""), error.get("message", "")[:160], seconds]

    await asyncio.gather(*(one(*bomb) for bomb in _bombs_of_compilation().items()))


def _bombs_of_compilation() -> dict[str, dict[str, object]]:
    """Each has at most 1 MiB, which is the bound of a source, but the last."""
    doubled = {
        f"r{level}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/r{level + 1}"} for key in "ab"}}
        for level in range(2000)
    }
    rules = "\n".join(f"r{level} ::= r{level + 1} r{level + 1}" for level in range(40))
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"items": {"$ref": "#"}}}}
    return {
        "nested quantifiers": {"regex": "((((a{0,900}b?){0,900}c?){0,900}d?){0,900})"},
        "quantifiers of a pattern": {"json_schema": {"type": "string", "pattern": "^(([ab]{0,999}){0,999}){9,999}$"}},
        "huge enum": {"json_schema": {"enum": [f"value {number}" for number in range(50_000)]}},
        "references to itself": {"json_schema": schema},
        "references that double": {"json_schema": {"$ref": "#/$defs/r0", "$defs": {**doubled, "r2000": {}}}},
        "rules that double": {"ebnf": f'root ::= r0\n{rules}\nr40 ::= "a" | "b"'},
        "pattern of 1 MiB": {"regex": "(a|b)?" * 170_000},
        "schema's pattern of 1 MiB": {"json_schema": {"type": "string", "pattern": "[a-z]?" * 170_000}},
        "deep groups": {"regex": "(" * 400_000 + "a" + ")" * 400_000},
        "deep schema": {"json_schema": '{"items":' * 100_000 + "{}" + "}" * 100_000},
        "pattern beyond 1 MiB": {"regex": "a" * (1 << 21)},
    }


async def _gaps(http: httpx.AsyncClient, body: dict[str, Any]) -> np.ndarray:
    async with http.stream("POST", "/v1/completions", json=body, timeout=None) as answer:
        return np.diff([time.perf_counter() async for line in answer.aiter_lines() if line.startswith("data: {")])


def _http(mesh: Mesh) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=f"http://{http_address(mesh)}", timeout=300.0, limits=limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shows", choices=("conformance", "kills", "bombs"))
    parser.add_argument("--generated", type=int, default=400, help="number of generated schemas")
    parser.add_argument("--tools", type=int, default=150, help="number of tool definitions")
    parser.add_argument("--store", type=int, default=0, help="number of SchemaStore's schemas, the smallest")
    parser.add_argument("--tokens", type=int, default=600, help="most tokens of a text")
    parser.add_argument("--texts", type=int, default=3, help="most texts of a schema, until one ends by itself")
    parser.add_argument("--streams", type=int, default=8, help="requests at a time")
    parser.add_argument("--rounds", type=int, default=10, help="kills of each daemon")
    parser.add_argument("--ahead-s", type=float, default=8.0, help="head start of the bombs")
    options = parser.parse_args()
    options.rng = np.random.default_rng(1)
    shown = {"conformance": conformance, "kills": kills, "bombs": bombs}[options.shows]
    began = time.monotonic()
    result = asyncio.run(shown(options))
    machine = f"{os.cpu_count()} shared cores, load {os.getloadavg()[0]:.0f}"
    command = f"python bench/guided_mesh.py {' '.join(sys.argv[1:])}"
    print(json.dumps({"command": command, "machine": machine, "seconds": round(time.monotonic() - began), **result}))


if __name__ == "__main__":
    main()
