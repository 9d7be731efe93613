"""A mesh whose worker drafts: what clients get is what a mesh without drafts gives, and kills change none of it."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from support.drafting import draft_folder, target_folder
from support.fault_injection import kill_once
from support.jobs import Job, recitations
from support.mesh import SERVICES, Mesh, running_mesh
from support.running_daemon import running
from support.serve_client import serve_client
from support.stream_load import StreamLoad

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.speculation.settings import SpeculativeAlgorithm
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 4, "speculative_adaptive": "false"}
# Texts that repeat themselves: answers are those of transformers.
GREEDY = ("twelve-days", "the-tyger", "genesis-1", "jabberwocky", "sonnet-18", "chat.tyger-for-ada")
WORDS = {"regex": "([a-f]{3} ){20,30}end"}


def flags_of(algorithm: str, model: str, topk: int = 1) -> dict[str, object]:
    """Flags of a worker that drafts so for a tiny model. topk > 1: trees."""
    flags = {**NGRAM, "speculative_algorithm": algorithm, "speculative_eagle_topk": topk}
    folder = draft_folder(algorithm, model)
    return flags if folder is None else {**flags, "speculative_draft_model_path": str(folder)}


def _greedy(model: str = "tiny-llama") -> list[Job]:
    jobs = {job.name: job for job in recitations(model, with_sampled=False)}
    return [jobs[name] for name in GREEDY]


async def _kill(mesh: Mesh, jobs: list[Job], services: tuple[str, ...]) -> None:
    """Kills each service with streams open, of which none fails and all give their job's answers."""
    pick = random.Random(3)
    # The last kill is that of a daemon which takes seconds to start; streams may be at the beginning of long texts.
    async with StreamLoad(mesh.client, jobs, num_streams=8, finish_s=300.0) as load:
        await load.all_progressed(0.0)
        for service in services:
            kill = await kill_once(mesh, load, service, signal.SIGKILL, pick)
            assert load.failures == [], (kill, load.failures[:3])
            print(kill)
        await load.finish()
    assert load.failures == [] and load.num_completed >= 8
    state = await mesh.scheduler_state()
    assert (state.num_page_violations, state.owned_pages) == (0, 0)
    assert mesh.bugs == []


@pytest.mark.slow
async def test_a_worker_told_to_draft_by_its_flags_gives_what_it_gives_without() -> None:
    """Prompts share prefixes, so that rows that draft have pages of each other."""
    shared = [50, 51, 52, 53] * 4
    plain, usages = await _served(shared, speculative_algorithm=SpeculativeAlgorithm.OFF)
    assert not any(usage.accepted_prediction_tokens or usage.rejected_prediction_tokens for usage in usages)
    ngram = {"speculative_algorithm": SpeculativeAlgorithm.NGRAM, "speculative_num_steps": 4}
    got, usages = await _served(shared, **ngram, speculative_adaptive=False)
    assert got == plain
    assert all(usage.accepted_prediction_tokens < usage.output_tokens for usage in usages)
    assert sum(usage.accepted_prediction_tokens for usage in usages) > 10
    assert (await _served(shared, **ngram))[0] == plain
    draft = {"speculative_draft_model_path": MODEL.with_name("tiny-deepseek"), "speculative_adaptive": False}
    got, usages = await _served(shared, speculative_algorithm=SpeculativeAlgorithm.STANDALONE, **draft)
    assert got == plain and sum(usage.accepted_prediction_tokens for usage in usages) > 10
    # Each data-parallel rank drafts for its own requests.
    got, usages = await _served(shared, **ngram, speculative_adaptive=False, dp_size=2)
    assert got == plain and sum(usage.accepted_prediction_tokens for usage in usages) > 10


async def _served(shared: list[int], **settings: object) -> tuple[list[object], list[common_pb2.Usage]]:
    """Tokens, logprobs and ends of requests to a scheduler and a worker, and what they used."""
    sizes = {"page_size": 4, "num_pages": 60, "num_slots": 4, "cpu_threads": 1}
    async with AsyncExitStack() as stack:
        addresses = []
        for rank in range(settings.get("dp_size", 1)):  # type: ignore[call-overload]
            rank_settings = WorkerSettings(backend=Backend.CPU, model=MODEL, dp_rank=rank, **sizes, **settings)  # type: ignore[arg-type]
            addresses.append((await stack.enter_async_context(running(WorkerDaemon, rank_settings))).address)
        scheduler_settings = SchedulerSettings(workers=tuple(addresses), check_invariants=True, chunk_tokens=24)
        async with running(SchedulerDaemon, scheduler_settings) as scheduler, serve_client(scheduler.address) as client:
            handles = []
            for number in range(6):
                sampling = common_pb2.SamplingParams(temperature=float(number % 2), seed=number, num_top_logprobs=2)
                sampling.logit_bias_ids, sampling.logit_bias_values = pack_ints([50, 51]), pack_floats([60.0, 60.0])
                prompt = [*shared[: 8 + 2 * number], 60 + number, *shared]
                handles.append(await client.submit(prompt, max_tokens=24, sampling=sampling))
            outputs = await client.over(*handles, timeout_s=120.0)
            async with open_channel(scheduler.address) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=30)
    assert all(seen.finished is not None and seen.finished.error.reason == 0 for seen in outputs)
    assert (state.num_page_violations, state.owned_pages) == (0, 0)
    return [(seen.tokens, seen.logprobs, seen.finished.reason) for seen in outputs], [
        seen.finished.usage for seen in outputs
    ]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("algorithm", "model", "topk"),
    [
        ("ngram", "tiny-llama", 1),
        ("standalone", "tiny-llama", 1),
        ("eagle3", "tiny-llama", 1),
        ("eagle3", "tiny-llama", 4),
        ("mtp", "tiny-deepseek", 1),
    ],
)
async def test_a_mesh_that_drafts_recites_and_kills_change_no_byte(algorithm: str, model: str, topk: int) -> None:
    jobs, folder = _greedy(model), target_folder(algorithm, model)
    worker = flags_of(algorithm, model, topk)
    async with running_mesh("cpu", model=folder.name, folder=folder, worker=worker) as mesh:
        got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        assert [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers] == []
        await _kill(mesh, jobs, SERVICES)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("algorithm", "topk"), [("eagle3", 1), ("eagle3", 3), ("ngram", 1)])
async def test_outputs_whose_prompts_another_worker_computed_are_drafted(algorithm: str, topk: int) -> None:
    """Disaggregated prefill and decode: a head knows nothing of what arrives, and drafts from what follows."""
    # Short prompts are computed where they are decoded.
    jobs = sorted(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))[:8]
    flags = flags_of(algorithm, "tiny-llama", topk)
    services = {"worker-prefill": {"cpu_threads": 1, **flags}, "scheduler-prefill": {"check_invariants": "true"}}
    async with running_mesh("pd", worker=flags, services=services) as mesh:
        # The second time their beginnings are cached.
        for _ in range(2):
            got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
            assert [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers] == []
        state = await mesh.scheduler_state()
        assert state.num_kv_arrived > 0 and (state.num_page_violations, state.owned_pages) == (0, 0)
        async with httpx.AsyncClient(timeout=60) as http, asyncio.timeout(60):
            while (await drafts_of_scheduler(http, mesh)).get(("accepted", "1"), 0.0) < 20:
                await asyncio.sleep(0.1)
        assert mesh.bugs == []


@pytest.mark.full
async def test_usage_and_metrics_tell_of_drafts() -> None:
    """One request that repeats a token; the first metrics are zero."""
    body = {"prompt": "a b a b a b", "max_tokens": 30, "temperature": 0, "logit_bias": {"50": 100}}
    async with running_mesh("cpu", worker=NGRAM) as mesh, httpx.AsyncClient(timeout=60) as http:
        url = f"http://{mesh.cluster.address('router', 1, 8000)}/v1/completions"
        before = await drafts_of_scheduler(http, mesh)
        assert before == {("drafted", "1"): 0.0, ("accepted", "1"): 0.0}
        answer = (await http.post(url, json={"model": "tiny-llama", **body})).json()
        usage = answer["usage"]
        details = usage["completion_tokens_details"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert 15 <= accepted < usage["completion_tokens"] == 30 and rejected >= 0
        async with asyncio.timeout(60):
            while (after := await drafts_of_scheduler(http, mesh)) == before:
                await asyncio.sleep(0.1)
        assert sum(num for (kind, _), num in after.items() if kind == "accepted") >= accepted
        assert {position for _, position in after} == {"1", "2", "3", "4"}
        worker = f"http://{mesh.cluster.address('worker', 1, 9100)}/metrics"
        assert float(re.findall(r"^radixmesh_draft_seconds_total (\S+)", (await http.get(worker)).text, re.M)[0]) > 0


async def drafts_of_scheduler(http: httpx.AsyncClient, mesh: Mesh) -> dict[tuple[str, str], float]:
    """The scheduler's counters, by kind and position."""
    text = (await http.get(f"http://{mesh.cluster.address('scheduler', 1, 9100)}/metrics")).text
    lines = re.findall(
        r'^radixmesh_(drafted|accepted)(?:_draft)?_tokens_total{position="(\d+)"} (\S+)', text, re.MULTILINE
    )
    return {(kind, position): float(number) for kind, position, number in lines}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page_size", "depth", "num_steps"), [(1, 2, 8), (16, 1, 4), (16, 0, 1)])
async def test_outputs_are_those_of_a_mesh_without_drafts(page_size: int, depth: int, num_steps: int) -> None:
    """Sampled with penalties, stop strings, several outputs, and under grammars; each daemon is killed meanwhile."""
    pytest.importorskip("xgrammar")
    guided = [
        Job(name=f"words-{seed}", prompt="Words", options={**WORDS, "seed": seed, "n": 1 + seed % 2})
        for seed in range(3)
    ]
    jobs = [*[job for job in recitations() if not job.answers or job.name in GREEDY], *guided]
    scheduler = {"pipeline_depth": depth, "chunk_tokens": 24}
    async with running_mesh("cpu", worker={"page_size": page_size}, scheduler=scheduler) as plain:
        jobs = [job if job.answers else job.learned(await job.run(plain.client)) for job in jobs]
    worker = {"page_size": page_size, **NGRAM, "speculative_num_steps": num_steps, "jump_forward_tokens": 3}
    async with running_mesh("cpu", worker=worker, scheduler=scheduler) as mesh:
        got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        assert [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers] == []
        await _kill(mesh, jobs, SERVICES)
