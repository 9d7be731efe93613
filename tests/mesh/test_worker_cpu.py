"""The CPU worker behind the contract: the tiny model recites, whatever the plans look like."""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.plans import Steps, admit, as_ints, chunk, grant
from support.running_daemon import running
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.result_codec import records_from_proto
from radixmesh.daemons.runtime.steps.step import PageCopy, StepPlan
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.worker.v1 import worker_pb2

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
NUM_TOKENS = 24


@asynccontextmanager
async def _worker(tmp_path, page_size):
    settings = WorkerSettings(
        backend=Backend.CPU,
        model=MODEL,
        page_size=page_size,
        num_pages=1024 // page_size,
        num_slots=8,
        max_total_len=256,
        cpu_threads=1,
        dump_folder=tmp_path,
    )
    async with running(WorkerDaemon, settings) as worker:
        yield worker


def _recitations(count):
    return json.loads((MODEL / "recitations.json").read_text())[:count]


def _first_plan(recitation, page_size, length):
    prompt = recitation["prompt_ids"]
    pages = range(2, 2 + -(-len(prompt + recitation["expected_ids"][:NUM_TOKENS]) // page_size))
    return StepPlan(
        epoch=1,
        step_id=1,
        admits=(admit(0, prompt, max_total_len=256),),
        grants=(grant(0, pages),),
        chunks=(chunk(0, length),),
    )


@pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 3), (16, 64)])
async def test_it_recites_with_plans_in_flight_and_after_a_new_claim(tmp_path, page_size, chunk_size):
    (recitation,) = _recitations(1)
    prompt, expected = recitation["prompt_ids"], recitation["expected_ids"]
    async with _worker(tmp_path, page_size) as worker:
        async with WorkerClient(worker.address, "a") as client:
            hello = await client.hold(1)
            assert hello.capabilities.is_deterministic
            assert list(hello.hello.model.eos_ids)
            left, step = len(prompt), 0
            while left:
                step += 1
                length = min(left, chunk_size)
                first = _first_plan(recitation, page_size, length)
                await client.plan(first if step == 1 else StepPlan(epoch=1, step_id=step, chunks=(chunk(0, length),)))
                left -= length
            for number in range(NUM_TOKENS // 2 - 1):
                step += 1
                await client.plan(StepPlan(epoch=1, step_id=step, decode_set=as_ints([0]) if number == 0 else None))
            ids = [token for _ in range(step) for token in (await client.result()).ids.tolist()]
            assert ids == expected[: NUM_TOKENS // 2]
        await _continue_in_new_epoch(worker, prompt, expected, page_size)


async def _continue_in_new_epoch(worker, prompt, expected, page_size):
    """Adopts everything from the records, with a page copy where the last page is partly filled, and goes on."""
    output = expected[: NUM_TOKENS // 2]
    tokens = prompt + output
    cached_len = len(tokens) - 1
    full, rest = divmod(cached_len, page_size)
    async with WorkerClient(worker.address, "b") as client:
        await client.hold(2)
        (message,) = await client.snapshot(2)
        records = records_from_proto(message)
        assert records.ids.tolist() == tokens[:cached_len]
        pages = list(range(2, 2 + full))
        fresh = range(2 + full + 1, 2 + full + 1 + -(-NUM_TOKENS // page_size) + 1)
        await client.plan(
            StepPlan(
                epoch=2,
                step_id=1,
                admits=(
                    admit(
                        5,
                        prompt,
                        output_ids=output,
                        max_total_len=256,
                        cached_len=cached_len,
                        cached_pages=pages,
                        cached_page_generations=records.generations[pages].tolist(),
                    ),
                ),
                grants=(grant(5, fresh),),
                page_copies=(PageCopy(source_page=2 + full, target_page=fresh[0], num_tokens=rest),) if rest else (),
                decode_set=as_ints([5]),
            )
        )
        for step in range(2, NUM_TOKENS // 2 + 1):
            await client.plan(StepPlan(epoch=2, step_id=step))
        ids = [token for _ in range(NUM_TOKENS // 2) for token in (await client.result()).ids.tolist()]
        assert ids == expected[NUM_TOKENS // 2 : NUM_TOKENS]


async def test_a_sampled_row_is_the_same_alone_and_in_a_batch_through_the_executor(tmp_path):
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=77, num_top_logprobs=2)
    first, *others = _recitations(4)
    outputs = []
    for batch in ([first], [*others, first]):
        async with _worker(tmp_path, 1) as worker:
            executor = worker.daemon.core.executor
            executor.begin_epoch(1)
            steps = Steps(executor)
            results = [
                steps.run(
                    admits=[
                        admit(slot, entry["prompt_ids"], max_total_len=256, sampling=sampling)
                        for slot, entry in enumerate(batch)
                    ],
                    grants=[grant(slot, range(100 * slot, 100 * slot + 100)) for slot in range(len(batch))],
                    chunks=[chunk(slot, len(entry["prompt_ids"])) for slot, entry in enumerate(batch)],
                )
            ]
            results += [steps.run(decodes=range(len(batch))) for _ in range(8)]
            assert all(len(result.logprobs) == len(batch) for result in results)
            own = [float(result.logprobs[-1].logprobs.own[0]) for result in results]
            outputs.append(([int(result.ids[-1]) for result in results], own))
    assert outputs[0] == outputs[1]


async def test_a_trace_of_steps_is_written_while_they_go_on(tmp_path):
    (recitation,) = _recitations(1)
    start, stop = (
        worker_pb2.ProfileRequest(action=action)
        for action in (worker_pb2.PROFILE_ACTION_START, worker_pb2.PROFILE_ACTION_STOP)
    )
    async with _worker(tmp_path / "traces", 1) as worker, WorkerClient(worker.address, "a") as client:

        async def refusal(request):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.stub.Profile(request)
            return mesh_error_from_rpc(caught.value)

        await client.hold(1)
        assert "no trace runs" in (await refusal(stop)).message
        assert (await refusal(worker_pb2.ProfileRequest())).reason_name == "MISSING_FIELD"
        too_long = worker_pb2.ProfileRequest(action=worker_pb2.PROFILE_ACTION_START, num_steps=10**6)
        assert (await refusal(too_long)).metadata["field"] == "num_steps"
        assert (await client.stub.Profile(start)).path == ""
        assert "a trace runs" in (await refusal(start)).message
        num_decodes = NUM_TOKENS // 2
        await client.plan(_first_plan(recitation, 1, len(recitation["prompt_ids"])))
        for step in range(2, num_decodes + 1):
            await client.plan(StepPlan(epoch=1, step_id=step, decode_set=as_ints([0]) if step == 2 else None))
            if step == num_decodes // 2:
                path = Path((await client.stub.Profile(stop)).path)
        ids = [token for _ in range(num_decodes) for token in (await client.result()).ids.tolist()]
        assert ids == recitation["expected_ids"][:num_decodes]
        assert path.parent == tmp_path / "traces" and "aten::" in path.read_text()
        path.unlink()
        path.parent.rmdir()
        path.parent.write_text("")
        error = await refusal(start)
        assert (error.reason_name, error.metadata) == ("INVALID_ARGUMENT", {"field": "dump_folder"})
