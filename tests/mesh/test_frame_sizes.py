"""Requests whose options are large, many at once, through deaths: no frame is larger than its reader takes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
from support.invariants import known_job, serves_on
from support.jobs import simulated_alphabet
from support.mesh import Mesh, running_mesh
from support.router_mesh import oracle_ids, router_mesh

from radixmesh.client import UnavailableError
from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2

N = 128
PROMPT = [10, 11, 12]
NUM_IDS = 2
# 64 KiB an output: 128 outputs of nine requests are 73 MiB, more than any message may have.
STOPS = [f"{i:02}" + "~" * 1022 for i in range(64)]


def stops_request(ordinal: int) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(
        request_id=f"stops-{ordinal}",
        prompt_ids=pack_ints(PROMPT),
        n=N,
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopParams(max_tokens=NUM_IDS, ignore_eos=True, stop=STOPS),
    )


def biased_request(ordinal: int) -> router_pb2.GenerateRequest:
    """Seven KiB of biases and stop ids, of which none changes a simulated token."""
    biased = list(range(768))
    return router_pb2.GenerateRequest(
        request_id=f"biased-{ordinal}",
        prompt_ids=pack_ints(PROMPT),
        n=N,
        sampling=common_pb2.SamplingParams(
            temperature=0,
            logit_bias_ids=pack_ints(biased),
            logit_bias_values=pack_floats([0.0] * len(biased)),
        ),
        stop=common_pb2.StopParams(max_tokens=1, ignore_eos=True, stop_ids=pack_ints(range(512, 768))),
    )


async def run(mesh: Mesh, request: router_pb2.GenerateRequest, accepted: asyncio.Event | None = None) -> None:
    """Every output whole and right, whoever died meanwhile."""
    ids = dict.fromkeys(range(request.n), b"")
    finished = set()
    async with open_channel(mesh.routers[0]) as channel:
        async for message in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
            if accepted is not None:
                accepted.set()
            for delta in message.deltas:
                ids[delta.index] += delta.ids
            for end in message.finished:
                assert end.reason == common_pb2.FINISH_REASON_LENGTH, end
                finished.add(end.index)
    expected = simulated_continuation(PROMPT, request.stop.max_tokens, alphabet=simulated_alphabet())
    assert len(finished) == request.n
    assert all(unpack_ints(got, "ids").tolist() == expected for got in ids.values())


def lost_links(mesh: Mesh) -> list[str]:
    return [line for line in mesh.cluster.recent_lines("router") if "peer_lost" in line]


async def test_nine_requests_with_64_long_stops_each_survive_the_detokenizer() -> None:
    async with running_mesh("simulated") as mesh:
        os.kill(mesh.cluster.pids["detokenizer-1"], signal.SIGSTOP)
        accepted = [asyncio.Event() for _ in range(9)]
        work = [asyncio.create_task(run(mesh, stops_request(i), accepted[i])) for i in range(9)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in accepted))
        mesh.cluster.kill("detokenizer")
        async with asyncio.timeout(60):
            await asyncio.gather(*work)
        await serves_on(mesh, known_job())
        assert len(lost_links(mesh)) <= 1, lost_links(mesh)


@pytest.mark.full
async def test_a_queue_full_of_large_requests_survives_the_scheduler() -> None:
    async with running_mesh("simulated", worker={"simulated_base_us": 20_000}) as mesh:
        accepted = [asyncio.Event() for _ in range(76)]
        work = [asyncio.create_task(run(mesh, biased_request(i), accepted[i])) for i in range(76)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in accepted))
        mesh.cluster.kill("scheduler")
        async with asyncio.timeout(120):
            await asyncio.gather(*work)
        await serves_on(mesh, known_job())
        assert len(lost_links(mesh)) <= 1, lost_links(mesh)


async def test_a_request_that_ends_every_stream_it_is_sent_on_fails_after_the_wait() -> None:
    """Each loss is followed by a connection that works: waiting is the sum of all that, not the last piece."""
    async with router_mesh(scheduler_wait_s=1.0) as mesh, mesh.client(resume_timeout_s=0) as client:
        fake, submitted = mesh.fakes[0], []

        def refuse(serving: object, submit: scheduler_pb2.Submit) -> None:
            submitted.append(submit.attempt)
            raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, "no stream survives this")

        fake.take_submit = refuse  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            with pytest.raises(UnavailableError, match="no scheduler could take"):
                await client.complete(PROMPT, max_tokens=8)
        assert len(submitted) > 1
        del fake.take_submit
        done = await client.complete(PROMPT, max_tokens=8, seed=3)
        assert done.outputs[0].ids == oracle_ids(PROMPT, 3, 8)
        await mesh.settle()


def gap(batch: scheduler_pb2.TokenBatch) -> None:
    firsts = unpack_ints(batch.first_output_indexes, "firsts").tolist()
    batch.first_output_indexes = pack_ints([*firsts[:-1], firsts[-1] + 5])


def no_logprobs(batch: scheduler_pb2.TokenBatch) -> None:
    del batch.logprobs[1]


def more_logprobs(batch: scheduler_pb2.TokenBatch) -> None:
    batch.logprobs[1].logprobs.token_logprobs += pack_floats([-1.0])


def malformed_logprobs(batch: scheduler_pb2.TokenBatch) -> None:
    batch.logprobs[1].logprobs.token_logprobs += b"x"


@pytest.mark.parametrize("fault", [gap, no_logprobs, more_logprobs, malformed_logprobs])
async def test_after_a_broken_frame_every_token_has_its_own_logprob(
    fault: Callable[[scheduler_pb2.TokenBatch], None],
) -> None:
    """The frame was half taken when it turned out to be broken: ids of some outputs, logprobs of others."""
    async with router_mesh() as mesh, mesh.client() as client:
        broken = []

        def mangle(frame: scheduler_pb2.ServeResponse) -> None:
            if (
                not broken
                and len(frame.tokens.logprobs) == 3
                and unpack_ints(frame.tokens.first_output_indexes, "")[0] > 2
            ):
                broken.append(frame)
                fault(frame.tokens)

        mesh.fakes[0].mangle = mangle
        async with asyncio.timeout(60):
            done = await client.complete(PROMPT, seed=5, max_tokens=30, n=3, logprobs=1)
        assert broken
        for output in done.outputs:
            assert output.ids == oracle_ids(PROMPT, 5, 30, index=output.index)
            assert output.logprobs is not None
            expected = [-(i + token / 1000) for i, token in enumerate(output.ids)]
            assert output.logprobs.token_logprobs == np.float32(expected).tolist()
        await mesh.settle()
