"""A request is one connected trace through all five daemons, and every daemon counts what it did for it."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from support.http import http_address
from support.jobs import simulated_jobs
from support.mesh import SERVICES, Mesh, running_mesh
from support.otlp_collector import Collector, SeenSpan, otlp_collector

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = simulated_jobs(2, num_tokens=300)[1]
# Each span under which other.
TREE = {
    "router.request": "",
    "router.encode": "router.request",
    "tokenizer.encode": "router.encode",
    "router.queue": "router.request",
    "scheduler.request": "router.request",
    "scheduler.queue": "scheduler.request",
    "scheduler.prefill": "scheduler.request",
    "scheduler.decode": "scheduler.request",
    "worker.request": "scheduler.request",
    "detokenizer.entry": "router.request",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[Collector]:
    async with otlp_collector() as collector:
        yield collector


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(collector: Collector) -> AsyncIterator[Mesh]:
    shared: dict[str, object] = {"otlp_endpoint": collector.address, "metrics_listen": "127.0.0.1:0"}
    with pytest.MonkeyPatch.context() as shell:
        shell.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        settings = {**dict.fromkeys(SERVICES, shared), "worker": {**shared, "simulated_base_us": 8000}}
        async with running_mesh("simulated", **settings) as mesh:  # type: ignore[arg-type]
            yield mesh
            assert mesh.bugs == []


def is_request(request_id: str):  # type: ignore[no-untyped-def]
    return lambda span: span.attributes.get("radixmesh.request_id") == request_id


async def test_a_request_is_one_trace_through_all_daemons(mesh: Mesh, collector: Collector) -> None:
    answer = await mesh.client.complete(LONG.prompt, temperature=0.0, max_tokens=40, request_id="traced")
    trace = await collector.trace_with(is_request("traced"), set(TREE))
    by_id = {span.id: span for span in trace}
    assert len(by_id) == len(trace) == len(TREE)
    assert {span.service for span in trace} == {f"radixmesh-{name}" for name in SERVICES}
    for span in trace:
        above = by_id.get(span.parent)
        assert (above.name if above is not None else span.parent) == TREE[span.name], span
        assert span.service == f"radixmesh-{span.name.partition('.')[0]}" and not span.error
        assert span.start_ns <= span.end_ns
        # All clocks are one machine's; moments of record() and of begin() are read one after the other.
        assert above is None or span.start_ns >= above.start_ns - 2_000_000, (span, above)
    spans = {span.name: span for span in trace}
    prompt_len, output_len = len(answer.prompt_ids), len(answer.outputs[0].ids)
    request, worker = spans["router.request"].attributes, spans["worker.request"]
    assert request["radixmesh.prompt_len"] == spans["tokenizer.encode"].attributes["radixmesh.prompt_len"] == prompt_len
    for name in ("router.request", "scheduler.request", "detokenizer.entry"):
        assert spans[name].attributes["radixmesh.output_len"] == output_len, name
    assert request["radixmesh.finish_reasons"] == "length" and 0 < request["radixmesh.ttft_ms"] < 20_000  # type: ignore[operator]
    assert spans["router.request"].events == ("first_token",) and "chunk" in worker.events
    assert worker.attributes["radixmesh.prefill_device_ms"] > 0  # type: ignore[operator]
    assert spans["scheduler.queue"].end_ns <= spans["scheduler.prefill"].end_ns <= spans["scheduler.decode"].end_ns
    again = await mesh.client.complete(LONG.prompt, temperature=0.0, max_tokens=2, request_id="traced-again")
    cached = again.outputs[0].finish.usage.cached_tokens  # type: ignore[union-attr]
    spans = {span.name: span for span in await collector.trace_with(is_request("traced-again"), set(TREE))}
    for name in ("router.request", "scheduler.request", "scheduler.prefill", "worker.request"):
        assert spans[name].attributes["radixmesh.cached_len"] == cached == prompt_len - 1, name


@pytest.mark.parametrize("server", ["http", "grpc"])
async def test_a_clients_trace_is_continued_or_left_alone(mesh: Mesh, collector: Collector, server: str) -> None:
    async def ask(context: str) -> None:
        if server == "http":
            async with httpx.AsyncClient(base_url=f"http://{http_address(mesh)}", timeout=30) as http:
                body = {"model": "tiny-llama", "prompt": LONG.prompt, "max_tokens": 2}
                answer = await http.post("/v1/completions", json=body, headers={"traceparent": context})
                assert answer.status_code == 200
            return
        async with open_channel(mesh.routers[0]) as channel:
            request = router_pb2.GenerateRequest(text=str(LONG.prompt))
            request.stop.max_tokens = 2
            stub = router_pb2_grpc.RouterServiceStub(channel)
            messages = [m async for m in stub.Generate(request, metadata=(("traceparent", context),))]
            assert messages[0].resolved.trace_context[3:35] in ("", context[3:35])

    trace, span = ("a" if server == "http" else "b") * 32, "c" * 16
    await ask(f"00-{trace[:-1]}0-{span}-00")  # Not sampled, by the client's own wish.
    await ask(f"00-{trace}-{span}-01")
    spans = await collector.trace_with(lambda seen: seen.trace == trace, set(TREE))
    assert [seen.parent for seen in spans if seen.name == "router.request"] == [span]
    assert collector.of(f"{trace[:-1]}0") == []


async def test_a_resumed_stream_continues_its_trace(mesh: Mesh, collector: Collector) -> None:
    stream = mesh.client.generate(
        LONG.prompt, temperature=0.0, max_tokens=len(LONG.answers[0].ids), request_id="resumed"
    )
    ids: list[int] = []
    is_killed = False
    async for chunk in stream:
        ids += chunk.ids
        if len(ids) > 5 and not is_killed:
            # Once: chunks that were on their way come behind it.
            is_killed = mesh.cluster.kill("router", 1, signal.SIGKILL)
            assert is_killed
    assert tuple(ids) == LONG.answers[0].ids and stream.num_resumptions == 1

    def is_second(span: SeenSpan) -> bool:
        return is_request("resumed")(span) and span.attributes.get("radixmesh.resumption", 0) > 0  # type: ignore[operator]

    def has_both_attempts(spans: list[SeenSpan]) -> bool:
        attempts = [s.attributes["radixmesh.attempt"] for s in spans if s.name == "scheduler.request"]
        # A resumption counts every try of the client to reach a router.
        return 0 in attempts and max(attempts) >= 1 << 16

    names = {"router.request", "scheduler.request", "worker.request"}
    await collector.trace_with(is_second, names, is_whole=has_both_attempts)


async def test_every_daemon_counts_what_it_did(mesh: Mesh) -> None:
    num_tokens, steps = 25, "radixmesh_step_round_trip_seconds_count"
    before = (await asyncio.to_thread(scrape, mesh, "scheduler"))[steps]
    await mesh.client.complete(LONG.prompt, temperature=0.0, max_tokens=num_tokens)
    async with asyncio.timeout(60):  # Scheduler and router export now and then.
        while (await asyncio.to_thread(scrape, mesh, "scheduler"))[steps] < before + num_tokens:
            await asyncio.sleep(0.05)
        while (await asyncio.to_thread(scrape, mesh, "router"))["radixmesh_requests_running"]:
            await asyncio.sleep(0.05)
    seen = {name: await asyncio.to_thread(scrape, mesh, name) for name in SERVICES}
    router, scheduler, worker = seen["router"], seen["scheduler"], seen["worker"]
    assert router["radixmesh_time_to_first_token_seconds_count"] >= 1
    assert router["radixmesh_inter_token_latency_seconds_count"] >= 1
    for hop in ("tokenizer", "scheduler", "detokenizer"):
        assert router[f'radixmesh_hop_seconds_count{{hop="{hop}"}}'] >= 1, hop
        assert 0 < router[f'radixmesh_hop_seconds_sum{{hop="{hop}"}}'] < 60, hop
    assert router["radixmesh_output_tokens_total"] >= num_tokens and router["radixmesh_requests_running"] == 0
    assert scheduler["radixmesh_queue_seconds_count"] == scheduler["radixmesh_prefill_seconds_count"] >= 4
    assert scheduler["radixmesh_step_round_trip_seconds_count"] >= num_tokens
    assert scheduler["radixmesh_step_round_trip_seconds_sum"] > scheduler["radixmesh_step_seconds_sum"] > 0
    assert 0 <= scheduler["radixmesh_gpu_idle_ratio"] <= 1 and scheduler['radixmesh_pages{state="free"}'] > 0
    assert worker["radixmesh_device_busy_seconds_total"] == pytest.approx(worker["radixmesh_step_seconds_sum"])
    assert seen["tokenizer"]["radixmesh_encoded_tokens_total"] >= 4 * 5
    assert seen["tokenizer"]["radixmesh_encode_seconds_count"] >= 4
    assert seen["detokenizer"]["radixmesh_detokenized_tokens_total"] >= num_tokens
    assert seen["detokenizer"]["radixmesh_detokenize_seconds_count"] >= 1


def scrape(mesh: Mesh, service: str) -> dict[str, float]:
    lines = [json.loads(line) for line in mesh.cluster.recent_lines(service) if line.startswith("{")]
    address = [line["metrics"] for line in lines if line["event"] == "listening"][-1]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}
