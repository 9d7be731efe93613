"""Bystanders' latency during attacks: a local mesh on the simulated worker, a hostile client in a process of its own.

For each attack: time to the first token of short requests beside it, the longest that a stream was without news, the
longest answer of each daemon to a health check, resident memory of each, daemons that died, and how the attacker was
answered. Then what a MiB of a hostile body costs the router: the longest silence by its bytes.

    python bench/hostile.py                             # all attacks, one JSON
    python bench/hostile.py --only texts stops          # some
    PYTHONPATH=OTHER_TREE/src python bench/hostile.py   # the daemons of another working tree
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.bystander import Seen, watched  # noqa: E402
from support.http import http_address  # noqa: E402
from support.mesh import Mesh, running_mesh  # noqa: E402

from radixmesh.common.v1 import common_pb2  # noqa: E402
from radixmesh.router.v1 import router_pb2, router_pb2_grpc  # noqa: E402

ATTACK_S = 40.0
_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
Answers = list[str]
_PROSE = "It was the best of times, it was the worst of times. "


async def texts(grpc_at: str, http_at: str) -> Answers:
    """Six valid texts of 4 MiB, which no context holds."""
    text = _PROSE * ((4 << 20) // len(_PROSE))
    return await _generate(grpc_at, [router_pb2.GenerateRequest(text=text)] * 6)


async def tokenize(grpc_at: str, http_at: str) -> Answers:
    """Six Tokenize calls of two texts of 4 MiB, which are encoded to their end."""
    text = _PROSE * ((4 << 20) // len(_PROSE))
    request = router_pb2.TokenizeRequest()
    for _ in range(2):
        request.items.add(text=text)
    return await _raw(grpc_at, "Tokenize", [request.SerializeToString()] * 6)


async def empty_items(grpc_at: str, http_at: str) -> Answers:
    """30 MiB of empty Tokenize.items."""
    return await _raw(grpc_at, "Tokenize", [b"\x12\x00" * (15 << 20)] * 2)


async def empty_messages(grpc_at: str, http_at: str) -> Answers:
    """7.6 MiB of empty chat messages, over HTTP."""
    body = b'{"messages":[' + b",".join([b"{}"] * 2_600_000) + b"]}"
    return [await _post(http_at, "/v1/chat/completions", body) for _ in range(2)]


async def stop_ids(grpc_at: str, http_at: str) -> Answers:
    """11 MiB of wrong stop_token_ids, over HTTP."""
    body = b'{"prompt":"x","stop_token_ids":[' + b",".join([b'"a"'] * 2_900_000) + b"]}"
    return [await _post(http_at, "/v1/completions", body) for _ in range(2)]


async def many_texts(grpc_at: str, http_at: str) -> Answers:
    """/tokenize of 2M texts, 5.7 MiB."""
    body = b'{"prompt":[' + b",".join([b'""'] * 2_000_000) + b"]}"
    return [await _post(http_at, "/tokenize", body) for _ in range(2)]


async def head(grpc_at: str, http_at: str) -> Answers:
    """One connection with an unfinished header of up to 70 MiB."""

    def send() -> str:
        host, _, port = http_at.rpartition(":")
        sent = 0
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nX-A: ")
            try:
                while sent < 70 << 20:
                    connection.sendall(b"a" * (64 << 10))
                    sent += 64 << 10
                return f"took {sent >> 20} MiB"
            except OSError as error:
                return f"{type(error).__name__} after {sent >> 10} KiB"

    return [await asyncio.to_thread(send)]


async def resume(grpc_at: str, http_at: str) -> Answers:
    """A resume of 1.2 MiB: 300,000 EOS ids for each of 128 outputs."""
    async with grpc.aio.insecure_channel(grpc_at) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        stop = common_pb2.StopParams(max_tokens=100, ignore_eos=True)
        call = stub.Generate(router_pb2.GenerateRequest(request_id="padded", text="x", n=128, stop=stop))
        resolved = (await call.read()).resolved  # type: ignore[union-attr]
        call.cancel()
    resolved.stop.ignore_eos = False
    resolved.model_identity.eos_ids = b"\x07\x00\x00\x00" * 300_000
    message = router_pb2.GenerateRequest()
    message.resume.resolved.CopyFrom(resolved)
    message.resume.resumption = 1
    for _ in range(128):
        message.resume.outputs.add()
    return await _generate(grpc_at, [message])


async def stops(grpc_at: str, http_at: str) -> Answers:
    """Nine requests of 128 outputs with 64 stop strings of 1 KiB each."""
    stop = common_pb2.StopParams(max_tokens=64, stop=[f"{i:04}" * 256 for i in range(64)])
    return await _generate(grpc_at, [router_pb2.GenerateRequest(text="The Tyger", n=128, stop=stop)] * 9)


ATTACKS: dict[str, Callable[[str, str], Awaitable[Answers]]] = {
    attack.__name__: attack
    for attack in (texts, tokenize, empty_items, empty_messages, stop_ids, many_texts, head, resume, stops)
}
# MiB of the one message or body whose parsing holds the router.
_PARSED_MIB = {"empty_items": 30.0, "empty_messages": 7.4, "stop_ids": 11.1, "many_texts": 5.7}


async def _generate(address: str, requests: list[router_pb2.GenerateRequest]) -> Answers:
    async def call(stub: router_pb2_grpc.RouterServiceAsyncStub, request: router_pb2.GenerateRequest) -> str:
        num_tokens = 0
        try:
            async for message in stub.Generate(request, timeout=ATTACK_S):
                num_tokens += sum(len(delta.ids) // 4 for delta in message.deltas)
        except grpc.RpcError as error:
            return _said(error)
        return "OK" if num_tokens else "OK without tokens"

    async with grpc.aio.insecure_channel(address, options=_UNLIMITED) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return await asyncio.gather(*(call(stub, request) for request in requests))


async def _raw(address: str, verb: str, messages: list[bytes]) -> Answers:
    async def call(channel: grpc.aio.Channel, message: bytes) -> str:
        try:
            await channel.unary_unary(f"/radixmesh.router.v1.RouterService/{verb}")(message, timeout=ATTACK_S)
        except grpc.RpcError as error:
            return _said(error)
        return "OK"

    async with grpc.aio.insecure_channel(address, options=_UNLIMITED) as channel:
        return await asyncio.gather(*(call(channel, message) for message in messages))


async def _post(address: str, path: str, body: bytes) -> str:
    import httpx

    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=ATTACK_S) as client:
        try:
            answer = await client.post(path, content=body, headers=headers)
        except httpx.HTTPError as error:
            return type(error).__name__
    return f"{answer.status_code} {answer.text[:120]}"


def _said(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {(error.details() or '')[:120]}"  # type: ignore[attr-defined]


async def measured(mesh: Mesh, name: str) -> dict[str, object]:
    """One attack by a process of its own, and two seconds without it before and after."""
    pids = dict(mesh.cluster.pids)
    async with watched(mesh) as seen:
        await asyncio.sleep(2)
        baseline = Seen(ttfts_s=list(seen.ttfts_s), stall_s=seen.stall_s)
        since_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--attack",
            name,
            mesh.routers[0],
            http_address(mesh),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        took_s = time.monotonic() - since_s
        await asyncio.sleep(2)
    await mesh.cluster.wait_healthy(120)
    during = seen.ttfts_s[len(baseline.ttfts_s) :]
    return {
        "attack": (ATTACKS[name].__doc__ or "").strip(),
        "answers": sorted(json.loads(said or b"[]")),
        "attack_s": round(took_s, 2),
        "baseline_ttft_ms": round(1000 * statistics.median(baseline.ttfts_s), 1) if baseline.ttfts_s else None,
        "ttft_p50_ms": round(1000 * statistics.median(during), 1) if during else None,
        "ttft_max_ms": round(1000 * max(during), 1) if during else None,
        "longest_stall_s": round(seen.stall_s, 2),
        "bystander_errors": len(seen.errors),
        "longest_silence_s": {name: round(value, 2) for name, value in seen.silence_s.items()},
        "max_rss_mib": {name: round(value) for name, value in seen.rss_mib.items()},
        "died": sorted(name for name, pid in pids.items() if mesh.cluster.pids.get(name) != pid),
    }


async def main(only: list[str]) -> dict[str, object]:
    results: dict[str, dict[str, object]] = {}
    for name in only:
        # A mesh of its own: what one attack left in memory is not the next one's.
        async with running_mesh("simulated", worker={"simulated_base_us": 2000}) as mesh:
            results[name] = await measured(mesh, name)
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    parse = {
        name: round(1000 * results[name]["longest_silence_s"]["router"] / mib, 1)  # type: ignore[index]
        for name, mib in _PARSED_MIB.items()
        if name in results
    }
    return {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
        },
        "load_at_end": os.getloadavg()[0],
        "attacks": results,
        "router_silence_ms_per_mib": parse,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        attack_name, grpc_address, http_server = arguments.attack
        print(json.dumps(asyncio.run(ATTACKS[attack_name](grpc_address, http_server))))
    else:
        print(json.dumps(asyncio.run(main(arguments.only)), indent=1))
