"""Replicas of one model that differ in context, KV memory or checkpoint: a request runs where all of it fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from support.router_mesh import CONTEXT, MODEL, RouterMesh, connected, oracle_ids, router_mesh
from support.router_mesh import PROMPT_OF_TESTS as PROMPT

from radixmesh.client import RadixMeshError
from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.messages import identity_from_proto
from radixmesh.daemons.router.peers.schedulers.served_models import served_models
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.router.v1 import router_pb2

SMALL_CONTEXT = 64
LONG_PROMPT = [5 + i % 50 for i in range(100)]


def model_of(**changes: object) -> common_pb2.ModelIdentity:
    identity = common_pb2.ModelIdentity()
    identity.CopyFrom(MODEL)
    identity.MergeFrom(common_pb2.ModelIdentity(**changes))  # type: ignore[arg-type]
    return identity


@asynccontextmanager
async def sized_mesh(
    *sizes: tuple[int, int], routers: int = 1, scheduler_wait_s: float = 60.0, num_ranks: int = 1
) -> AsyncIterator[RouterMesh]:
    """One scheduler per (context, pages); the first one has num_ranks data-parallel ranks of so many pages."""
    settings = {"policy": "round_robin", "scheduler_wait_s": scheduler_wait_s}
    async with router_mesh(schedulers=len(sizes), routers=routers, **settings) as mesh:
        for fake, member, (context, num_pages) in zip(mesh.fakes, mesh.schedulers, sizes, strict=True):
            fake.model, fake.num_pages = model_of(max_total_len=context), num_pages
            await member.kill()
        mesh.fakes[0].num_ranks = num_ranks
        for i in range(routers):
            await until(lambda i=i: not any(link.is_connected for link in mesh.router(i).schedulers.links))  # type: ignore[misc]
        for member in mesh.schedulers:
            await member.start()
        for i in range(routers):
            await connected(mesh.router(i))
        yield mesh


async def until(is_true: object) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def run(mesh: RouterMesh, prompt: list[int], max_tokens: int, times: int = 6) -> None:
    async with mesh.client() as client:
        for seed in range(times):
            answer = await client.complete(prompt, seed=seed, max_tokens=max_tokens, ignore_eos=True)
            assert len(answer.outputs[0].ids) == max_tokens


async def test_a_shorter_context_ends_no_output_early() -> None:
    async with sized_mesh((SMALL_CONTEXT, 1000), (CONTEXT, 1000)) as mesh:
        await run(mesh, list(PROMPT), 120)
        assert not mesh.fakes[0].submits
        await run(mesh, list(PROMPT), 40)
        assert len(mesh.fakes[0].submits) == 3, "what fits both goes to both"
        await mesh.settle()


async def test_less_memory_refuses_nothing_that_fits_another() -> None:
    async with sized_mesh((CONTEXT, 50), (CONTEXT, 1000)) as mesh:
        await run(mesh, LONG_PROMPT, 20)
        assert not mesh.fakes[0].submits
        await mesh.settle()


async def test_an_output_has_the_memory_of_one_rank() -> None:
    async with sized_mesh((CONTEXT, 50), (CONTEXT, 1000), num_ranks=4) as mesh:
        await run(mesh, LONG_PROMPT, 20)
        assert not mesh.fakes[0].submits
    async with sized_mesh((CONTEXT, 120), num_ranks=4) as mesh, mesh.client() as client:
        answer = await client.complete(LONG_PROMPT, seed=1, ignore_eos=True)
        assert len(answer.outputs[0].ids) == 21, "without max_tokens it ends where that memory does"


async def test_where_nobody_has_the_memory_a_shorter_context_is_no_choice() -> None:
    """It would end the output as if that had been asked for; who has the context says how much memory there is."""
    async with sized_mesh((SMALL_CONTEXT, 1000), (CONTEXT, 70)) as mesh, mesh.client() as client:
        with pytest.raises(RadixMeshError) as raised:
            await client.complete(LONG_PROMPT[:40], max_tokens=100)
        assert raised.value.reason == "NEVER_FITS"
        assert not mesh.fakes[0].submits and len(mesh.fakes[1].submits) == 1
        await mesh.settle()


async def test_a_replica_that_says_never_is_not_the_last_word() -> None:
    """It has lost memory since it said hello: nobody could know."""
    async with sized_mesh((CONTEXT, 1000), (CONTEXT, 1000)) as mesh:
        mesh.fakes[0].num_pages = 50
        await run(mesh, LONG_PROMPT, 20)
        assert 1 <= len(mesh.fakes[0].submits) <= 6
        assert mesh.fakes[1].submits
        mesh.fakes[1].num_pages = 60
        async with mesh.client() as client:
            with pytest.raises(RadixMeshError, match="pages") as raised:
                await client.complete(LONG_PROMPT, max_tokens=20)
            assert raised.value.reason == "NEVER_FITS"
        await mesh.settle()


async def test_an_output_that_a_smaller_context_cut_goes_on_elsewhere() -> None:
    async with sized_mesh((CONTEXT, 1000), (CONTEXT, 1000)) as mesh:
        mesh.fakes[0].model = model_of(max_total_len=SMALL_CONTEXT)
        async with mesh.client() as client:
            for seed in range(4):
                answer = await client.complete(list(PROMPT), seed=seed, max_tokens=120)
                assert answer.outputs[0].ids == oracle_ids(PROMPT, seed, 120)
        assert mesh.fakes[0].submits
        await mesh.settle()


async def test_a_request_waits_for_the_replica_that_it_fits() -> None:
    async with sized_mesh((SMALL_CONTEXT, 1000), (CONTEXT, 1000)) as mesh, mesh.client() as client:
        await mesh.schedulers[1].kill()
        await until(lambda: not mesh.router().schedulers.links[1].is_connected)
        waiting = asyncio.create_task(client.complete(LONG_PROMPT, seed=1, max_tokens=20, ignore_eos=True))
        await until(lambda: mesh.router().schedulers.num_waiting == 1)
        await mesh.schedulers[1].start()
        assert len((await waiting).outputs[0].ids) == 20
        assert not mesh.fakes[0].submits
        await mesh.settle()


async def test_without_max_tokens_replicas_of_nearly_the_same_size_are_equal() -> None:
    async with sized_mesh((CONTEXT, 200), (CONTEXT, 190), (CONTEXT, 20)) as mesh, mesh.client() as client:
        for seed in range(4):
            answer = await client.complete(list(PROMPT), seed=seed, ignore_eos=True)
            assert len(answer.outputs[0].ids) == 191 - len(PROMPT)
        assert [len(fake.submits) for fake in mesh.fakes] == [2, 2, 0]
        answer = await client.complete([5] * 195, ignore_eos=True)
        assert len(answer.outputs[0].ids) == 201 - 195, "only the largest holds the prompt"
        await mesh.settle()


async def test_a_resume_that_no_replica_holds_now_can_be_sent_again() -> None:
    async with sized_mesh((SMALL_CONTEXT, 1000)) as mesh, mesh.stub() as stub:
        resolved = router_pb2.Resolved(
            request_id="r", model=MODEL.name, model_identity=MODEL, prompt_ids=pack_ints(PROMPT), seeds=[1]
        )
        resolved.stop.max_tokens = 200
        resume = router_pb2.Resume(resolved=resolved, outputs=[router_pb2.OutputProgress()], resumption=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(router_pb2.GenerateRequest(resume=resume)):
                pass
        assert mesh_error_from_rpc(raised.value).reason == ErrorReason.ERROR_REASON_NO_REPLICA
        await mesh.settle()


async def test_a_stream_of_the_old_checkpoint_resumes_on_the_old_replica() -> None:
    """One name, two models, while replicas are replaced: each request goes on where it began."""
    async with sized_mesh((CONTEXT, 1000), (CONTEXT, 1000), (CONTEXT, 1000)) as mesh, mesh.stub() as stub:
        for i in (1, 2):
            mesh.fakes[i].model = model_of(model_fingerprint="new")
            await mesh.schedulers[i].restart()
        links = mesh.router().schedulers.links
        await until(
            lambda: [link.is_connected and link.identity.model_fingerprint for link in links][1:] == ["new"] * 2
        )
        (served,) = mesh.router().schedulers.models()
        assert (served.identity.model_fingerprint, served.num_schedulers) == ("new", 2), "what most of them serve"
        resolved = router_pb2.Resolved(
            request_id="r", model=MODEL.name, model_identity=MODEL, prompt_ids=pack_ints(PROMPT), seeds=[1]
        )
        resolved.stop.max_tokens = 20
        resume = router_pb2.Resume(resolved=resolved, outputs=[router_pb2.OutputProgress()], resumption=1)
        call = stub.Generate(router_pb2.GenerateRequest(resume=resume))
        responses = [response async for response in call]
        assert responses[0].resolved.model_identity.model_fingerprint == MODEL.model_fingerprint
        assert [f.error.reason for response in responses for f in response.finished] == [0]
        assert len(mesh.fakes[0].submits) == 1
        await mesh.settle()


class Known:
    """A replica by its hello."""

    def __init__(self, identity: common_pb2.ModelIdentity, size: int, adapters: tuple[str, ...] = ()) -> None:
        self.is_connected = True
        self.identity = identity_from_proto(identity)
        self.models = (identity.name, *adapters)
        self.max_request_len = size


def test_models_are_told_apart_by_more_than_their_names() -> None:
    old, new = model_of(), model_of(model_fingerprint="new", max_total_len=CONTEXT // 2)
    replicas = [Known(old, 100, ("lora",)), Known(new, 80), Known(new, 90), Known(model_of(max_total_len=99), 99)]
    replicas[0].is_connected = False
    models = {(model.name, model.identity.model_fingerprint): model for model in served_models(replicas)}
    assert list(models) == [("tiny-llama", "new"), ("tiny-llama", "f00d"), ("lora", "f00d")]
    assert models["tiny-llama", "new"].num_schedulers == 2
    assert models["tiny-llama", "new"].request_lens == (80, 90)
    first = models["tiny-llama", "f00d"]
    assert (first.num_schedulers, first.identity.max_total_len, sorted(first.request_lens)) == (1, CONTEXT, [99, 100])
    assert models["lora", "f00d"].base_model == "tiny-llama"
    assert old.max_total_len == CONTEXT and replicas[3].identity.max_total_len == 99, "hellos are not written to"
