"""A router among real tokenizers and detokenizers and made-up schedulers: what clients get when nothing dies."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import numpy as np
import pytest
from support.router_mesh import MODEL, VOCABULARY, oracle_ids, oracle_text, router_mesh

from radixmesh.client import AbortedError, Client, DeadlineExceededError, InvalidRequestError, OverloadedError
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.router.v1 import router_pb2

PROMPT = [5, 6, 7, 8]


async def test_text_ids_and_chat_give_what_the_scheduler_and_a_full_decode_give() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        by_ids = await client.complete(PROMPT, seed=7, max_tokens=60)
        ids = oracle_ids(PROMPT, 7, 60)
        assert by_ids.outputs[0].ids == ids
        assert by_ids.text == oracle_text(ids, PROMPT)[0]
        assert by_ids.text == VOCABULARY.tokenizer.decode(ids, skip_special_tokens=True)
        by_text = await client.complete("Call me Ishmael.", seed=1, max_tokens=20)
        assert by_text.prompt_ids == await client.tokenize("Call me Ishmael.")
        assert by_text.outputs[0].ids == oracle_ids(by_text.prompt_ids, 1, 20)
        messages = [{"role": "user", "content": "hello"}]
        by_chat = await client.complete(messages=messages, seed=1, max_tokens=20)
        assert by_chat.prompt_ids == await client.tokenize(messages=messages)
        finish = by_chat.outputs[0].finish
        assert finish is not None and finish.usage.prompt_tokens == len(by_chat.prompt_ids)
        await mesh.settle()


async def test_outputs_have_seeds_of_their_own_and_the_chosen_seed_is_told() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        stream = client.generate(PROMPT, n=3, max_tokens=30)
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in stream:
            ids[chunk.index] += chunk.ids
        seed = stream.seeds[0]
        assert [ids[i] for i in range(3)] == [oracle_ids(PROMPT, seed, 30, index=i) for i in range(3)]
        assert len({tuple(ids[i][:5]) for i in range(3)}) == 3
        again = client.generate(PROMPT, n=1, max_tokens=30)
        await again.aclose()
        await mesh.settle()


async def test_logprobs_follow_their_ids_and_prompt_logprobs_come_once() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        done = await client.complete(PROMPT, seed=3, max_tokens=25, logprobs=2, prompt_logprobs=True, n=2)
        for output in done.outputs:
            assert output.logprobs is not None
            expected = [-(i + token / 1000) for i, token in enumerate(output.ids)]
            assert output.logprobs.token_logprobs == np.float32(expected).tolist()
            assert output.logprobs.top_ids == [[token, token + 1] for token in output.ids]
        assert done.prompt_logprobs is not None
        expected = [-(i + token / 1000) for i, token in enumerate(PROMPT)][1:]
        assert done.prompt_logprobs.token_logprobs == np.float32(expected).tolist()
        assert [submit.sampling.prompt_logprobs for submit in mesh.fakes[0].submits] == [True, False]


async def test_a_stop_string_cuts_text_ids_and_usage_and_the_scheduler_hears_of_it() -> None:
    ids = oracle_ids(PROMPT, 11, 80)
    text = oracle_text(ids, PROMPT)[0]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    expected, counted, found = oracle_text(ids, PROMPT, [stop])
    async with router_mesh() as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.001
        received: list[int] = []
        stream = client.generate(PROMPT, seed=11, max_tokens=80, stop=stop)
        got = ""
        async for chunk in stream:
            received += chunk.ids
            got += chunk.text
            finish = chunk.finish
        assert (got, received) == (expected, counted)
        assert finish is not None and (finish.reason, finish.stop) == ("stop", found) and found == stop
        assert finish.usage.output_tokens == len(counted) and finish.usage.cached_tokens == 3
        # The scheduler may hear of it behind the client.
        await mesh.settle()
        assert [stop.num_output for stop in mesh.fakes[0].stops] == [len(counted)]


async def test_ids_only_needs_no_detokenizer() -> None:
    async with router_mesh(detokenizers=0, tokenizers=0) as mesh, mesh.client() as client:
        done = await client.complete(PROMPT, seed=5, max_tokens=40, ids_only=True, ignore_eos=True)
        assert done.outputs[0].ids[:10] == oracle_ids(PROMPT, 5, 10) and not done.text


async def test_a_client_that_leaves_aborts_its_request() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.005
        stream = client.generate(PROMPT, n=2, max_tokens=400, ignore_eos=True)
        await anext(aiter(stream))
        assert mesh.fakes[0].num_running == 2
        await stream.aclose()
        await mesh.settle()
        (abort,) = mesh.fakes[0].aborts
        assert abort.is_own, "another router may have taken it over just now"
        assert abort.request_id == stream.request_id
        # A resumption of the same request elsewhere must survive this abort.
        assert abort.below_attempt == 1 << 16


async def test_abort_says_what_it_found_and_crosses_over_to_other_routers() -> None:
    async with router_mesh(routers=2) as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.005
        stream = client.generate(PROMPT, max_tokens=400, ignore_eos=True)
        chunks = [await anext(aiter(stream))]
        async with mesh.stub(1) as other:
            answer = await other.Abort(router_pb2.AbortRequest(request_id=stream.request_id))
            assert answer.outcome == router_pb2.ABORT_OUTCOME_FOUND
            chunks += [chunk async for chunk in stream]
            finish = chunks[-1].finish
            assert finish is not None and finish.reason == "abort" and isinstance(finish.error, AbortedError)
            answer = await other.Abort(router_pb2.AbortRequest(request_id=stream.request_id))
            assert answer.outcome == router_pb2.ABORT_OUTCOME_FINISHED
            answer = await other.Abort(router_pb2.AbortRequest(request_id="nobody"))
            assert answer.outcome == router_pb2.ABORT_OUTCOME_UNKNOWN
        await mesh.settle()


async def test_an_abort_ends_requests_that_wait_for_a_tokenizer_or_a_scheduler() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        await mesh.tokenizers[0].kill()
        waiting = asyncio.create_task(client.complete("text", request_id="t", max_tokens=5))
        await _until(lambda: mesh.router().num_streams == 1)
        assert await client.abort("t") == "found"
        with pytest.raises(AbortedError):
            await waiting
        await mesh.schedulers[0].kill()
        await _until(lambda: not mesh.router().schedulers.links[0].is_connected)
        waiting = asyncio.create_task(client.complete(PROMPT, request_id="s", max_tokens=5))
        await _until(lambda: mesh.router().schedulers.num_waiting == 1)
        assert await client.abort("s") == "found"
        finish = (await waiting).outputs[0].finish
        assert finish is not None and finish.reason == "abort"
        await mesh.settle()


async def test_a_deadline_ends_a_request_with_what_there_is() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.02
        chunks = []
        with pytest.raises(DeadlineExceededError):
            async for chunk in client.generate(PROMPT, max_tokens=400, ignore_eos=True, seed=1, deadline_s=0.5):
                chunks.append(chunk)
        ids = [token for chunk in chunks for token in chunk.ids]
        finish = chunks[-1].finish
        assert ids and finish is not None and finish.usage.output_tokens == len(ids)
        assert 0 < mesh.fakes[0].submits[0].deadline_ms <= 500
        await mesh.schedulers[0].kill()
        await _until(lambda: not mesh.router().schedulers.links[0].is_connected)
        with pytest.raises(DeadlineExceededError):
            await client.complete(PROMPT, max_tokens=4, deadline_s=0.3)
        await mesh.settle()


async def test_a_slow_reader_gets_bigger_deltas_and_one_that_never_reads_is_aborted() -> None:
    async with router_mesh(client_stall_s=0.5) as mesh, mesh.stub() as stub, mesh.client() as client:
        mesh.fakes[0].per_step = 4
        # Bigger than what flow control lets through unread.
        options = {"max_tokens": 500, "ignore_eos": True, "seed": 2, "logprobs": 64, "n": 64}
        call = stub.Generate(
            router_pb2.GenerateRequest(
                prompt_ids=pack_ints(PROMPT),
                n=64,
                sampling=common_pb2.SamplingParams(num_top_logprobs=64, seed=2),
                stop=common_pb2.StopParams(max_tokens=500, ignore_eos=True),
            )
        )
        await call.read()
        await mesh.settle()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert raised.value.code() is grpc.StatusCode.ABORTED
        done = await client.complete(PROMPT, **options)  # type: ignore[arg-type]
        assert [len(output.ids) for output in done.outputs] == [500] * 64
        await mesh.settle()


async def test_answers_that_nobody_reads_do_not_grow_beyond_the_journal() -> None:
    """Each is more than flow control lets through unread; a client that reads gets its own whole meanwhile."""
    max_bytes = 6 << 20
    async with router_mesh(journal_bytes=max_bytes, client_stall_s=600.0) as mesh, mesh.stub() as stub:
        mesh.fakes[0].per_step = 20
        request = router_pb2.GenerateRequest(
            prompt_ids=pack_ints(PROMPT),
            n=32,
            sampling=common_pb2.SamplingParams(num_top_logprobs=64, seed=2),
            stop=common_pb2.StopParams(max_tokens=400, ignore_eos=True),
        )
        calls = [stub.Generate(request) for _ in range(4)]
        for call in calls:
            await call.read()
        journal = mesh.router().journal
        await _until(lambda: mesh.fakes[0].num_running == 0 and journal.num_bytes > 0)
        await _until(lambda: journal.num_bytes <= max_bytes)
        async with mesh.client() as client:
            assert len((await client.complete(PROMPT, max_tokens=20, ignore_eos=True)).outputs[0].ids) == 20
        codes = []
        for call in calls:
            with suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            codes.append(await call.code())
        assert codes.count(grpc.StatusCode.ABORTED) >= 1 and codes.count(grpc.StatusCode.OK) >= 1, codes
        await mesh.settle()


async def test_a_full_journal_refuses_with_a_time_to_retry() -> None:
    async with router_mesh(journal_bytes=50_000) as mesh, mesh.client() as client:
        mesh.fakes[0].is_paused = True
        first = asyncio.create_task(client.complete(PROMPT, max_tokens=5, seed=1))
        await _until(lambda: mesh.fakes[0].num_running == 1)
        with pytest.raises(OverloadedError) as raised:
            await client.complete(PROMPT, max_tokens=5)
        assert raised.value.reason == "JOURNAL_FULL" and raised.value.retry_after_s == 1.0
        mesh.fakes[0].is_paused = False
        assert (await first).outputs[0].ids == oracle_ids(PROMPT, 1, 5)
        await mesh.settle()
        await client.complete(PROMPT, max_tokens=5)


async def test_a_live_request_id_is_refused_a_second_time() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        mesh.fakes[0].is_paused = True
        first = asyncio.create_task(client.complete(PROMPT, max_tokens=5, request_id="same"))
        await _until(lambda: mesh.fakes[0].num_running == 1)
        with pytest.raises(InvalidRequestError) as raised:
            await client.complete(PROMPT, max_tokens=5, request_id="same")
        assert raised.value.reason == "DUPLICATE_REQUEST"
        mesh.fakes[0].is_paused = False
        await first
        # The id is free again, at once, though the scheduler has just been told to forget the first one.
        for _ in range(20):
            await client.complete(PROMPT, max_tokens=5, request_id="same")


async def test_models_and_schedulers_are_listed_added_drained_and_removed() -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client, mesh.admin() as admin:
        (model,) = await client.models()
        assert (model.name, model.num_schedulers, model.max_total_len) == ("tiny-llama", 2, MODEL.max_total_len)
        first, second = (member.address for member in mesh.schedulers)
        await admin.DrainScheduler(router_pb2.DrainSchedulerRequest(address=first))
        for _ in range(4):
            await client.complete(PROMPT, max_tokens=3)
        assert not mesh.fakes[0].submits and len(mesh.fakes[1].submits) == 4
        mesh.fakes[1].is_paused = True
        moved = asyncio.create_task(client.complete(PROMPT, max_tokens=9, seed=9))
        await _until(lambda: mesh.fakes[1].num_running == 1)
        await admin.RemoveScheduler(router_pb2.RemoveSchedulerRequest(address=first))
        await admin.AddScheduler(router_pb2.AddSchedulerRequest(address=first))
        await admin.RemoveScheduler(router_pb2.RemoveSchedulerRequest(address=second))
        assert (await moved).outputs[0].ids == oracle_ids(PROMPT, 9, 9)
        listed = (await admin.ListSchedulers(router_pb2.ListSchedulersRequest())).schedulers
        assert [(info.address, info.is_connected, info.group) for info in listed] == [(first, True, "serving")]


async def test_a_draining_router_finishes_what_runs_and_takes_nothing_new() -> None:
    async with router_mesh(routers=2) as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.005
        streams = [client.generate(PROMPT, max_tokens=60, seed=i) for i in range(2)]
        firsts = [await anext(aiter(stream)) for stream in streams]
        mesh.routers[0].drain()
        for i, stream in enumerate(streams):
            ids = firsts[i].ids + [token async for chunk in stream for token in chunk.ids]
            assert ids == oracle_ids(PROMPT, i, 60)
        for i in range(4):
            assert (await client.complete(PROMPT, max_tokens=4, seed=i)).outputs[0].ids == oracle_ids(PROMPT, i, 4)
        assert mesh.router(0).num_streams == 0


async def test_the_client_without_async() -> None:
    async with router_mesh() as mesh:
        mesh.fakes[0].step_s = 0.002

        def use() -> None:
            with Client([mesh.routers[0].address]) as client:
                ids = [token for chunk in client.generate(PROMPT, seed=4, max_tokens=30) for token in chunk.ids]
                assert ids == oracle_ids(PROMPT, 4, 30)
                assert client.complete(PROMPT, seed=4, max_tokens=30).outputs[0].ids == ids
                assert client.models()[0].name == "tiny-llama" and client.tokenize("abc")
                with client.generate(PROMPT, max_tokens=400, ignore_eos=True) as stream:
                    next(iter(stream))
                with pytest.raises(InvalidRequestError):
                    client.complete([], max_tokens=3)

        await asyncio.to_thread(use)
        await mesh.settle()


async def _until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
