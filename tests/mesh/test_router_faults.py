"""Deaths around the router, and of the router itself: concatenated deltas equal the oracle whatever dies when."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from support.fake_scheduler import FakeScheduler
from support.router_mesh import MODEL, RouterMesh, connected, live_through_deaths, oracle_ids, oracle_text, router_mesh

from radixmesh.client import AsyncClient, Completion, UnavailableError
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.detokenizer.daemon import DetokenizerDaemon
from radixmesh.daemons.router.peers import peer_link
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2
from radixmesh.scheduler.v1 import scheduler_pb2

PROMPT = [5, 6, 7, 8]
MAX_TOKENS = 40


def check(done: Completion, seed: int, *, max_tokens: int = MAX_TOKENS, stops: tuple[str, ...] = ()) -> None:
    """done is what nobody's death has touched."""
    for output in done.outputs:
        ids = oracle_ids(PROMPT, seed, max_tokens, index=output.index)
        text, counted, stop = oracle_text(ids, PROMPT, stops)
        assert (output.ids, output.text) == (counted, text)
        assert output.finish is not None and output.finish.stop == stop
        if output.logprobs is not None:
            expected = [-(i + token / 1000) for i, token in enumerate(counted)]
            assert output.logprobs.token_logprobs == np.float32(expected).tolist()


async def run_many(client: AsyncClient, seeds: range, **options: object) -> None:
    """Requests of every kind at once, each checked: n = 2 on a quarter of them, stop strings, logprobs."""

    async def one(seed: int) -> None:
        text = oracle_text(oracle_ids(PROMPT, seed, MAX_TOKENS), PROMPT)[0]
        stops = (text[-6:-2],) if seed % 3 == 0 and len(text) > 20 else ()
        done = await client.complete(
            PROMPT,
            seed=seed,
            max_tokens=MAX_TOKENS,
            n=2 if seed % 4 == 0 else 1,
            stop=stops,
            logprobs=1 if seed % 5 == 0 else None,
            **options,  # type: ignore[arg-type]
        )
        check(done, seed, stops=stops)

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(seed) for seed in seeds))


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("num_schedulers", [1, 2])
async def test_the_scheduler_dies_at_every_token(num_schedulers: int) -> None:
    async with router_mesh(schedulers=num_schedulers) as mesh, mesh.client() as client:
        for cut in range(12):
            # One frame in which `cut` tokens exist already is the last that leaves.
            dying = mesh.fakes[0]
            dying.on_step = _kill_once(mesh, dying, cut)
            seeds = [100 * cut + i for i in range(2)]
            results = await asyncio.gather(
                *(client.complete(PROMPT, seed=seed, max_tokens=12, logprobs=1, n=2) for seed in seeds)
            )
            for seed, done in zip(seeds, results, strict=True):
                check(done, seed, max_tokens=12)
            dying.on_step = None
            await until(lambda: mesh.router().schedulers.links[0].is_connected)
        attempts = {submit.attempt for fake in mesh.fakes for submit in fake.submits}
        assert max(attempts) >= 1  # The deaths did happen with work on board.
        await mesh.settle()


def _kill_once(mesh: RouterMesh, fake: FakeScheduler, cut: int) -> Callable[[int], None]:
    base = fake.num_tokens
    killers: list[asyncio.Task[None]] = []

    def on_step(num_tokens: int) -> None:
        if num_tokens - base >= 2 * cut and not killers:
            killers.append(asyncio.create_task(mesh.schedulers[mesh.fakes.index(fake)].restart()))

    return on_step


@pytest.mark.parametrize("seed", range(3))
async def test_daemons_die_at_random_and_no_token_is_lost_or_repeated(seed: int) -> None:
    """Schedulers, detokenizers, tokenizers and routers, one after the other, two of each."""
    async with (
        router_mesh(tokenizers=2, detokenizers=2, schedulers=2, routers=2) as mesh,
        mesh.client(resume_timeout_s=30) as client,
    ):
        await live_through_deaths(mesh, seed, lambda seeds: run_many(client, seeds))


async def test_a_single_detokenizer_dies_again_and_again() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.003

        async def kill() -> None:
            for i in range(8):
                await asyncio.sleep(0.03 + 0.01 * i)
                await mesh.detokenizers[0].restart()

        killer = asyncio.create_task(kill())
        while not killer.done():
            await run_many(client, range(16))
        await killer
        await mesh.settle()


async def test_text_is_encoded_elsewhere_when_a_tokenizer_dies_or_is_away() -> None:
    async with router_mesh(tokenizers=2) as mesh, mesh.client() as client:
        expected = await client.tokenize("the end")
        await mesh.tokenizers[0].kill()
        for _ in range(4):
            done = await client.complete("the end", seed=1, max_tokens=3)
            assert done.prompt_ids == expected
        await mesh.tokenizers[1].kill()
        waiting = asyncio.create_task(client.tokenize("the end"))
        await asyncio.sleep(0.3)
        await mesh.tokenizers[0].start()
        assert await waiting == expected


async def test_no_tokenizer_within_the_wait_is_an_error() -> None:
    async with router_mesh(tokenizer_wait_s=0.3) as mesh, mesh.stub() as stub:
        await mesh.tokenizers[0].kill()
        async with AsyncClient([mesh.routers[0].address], resume_timeout_s=0.1) as client:
            with pytest.raises(UnavailableError) as raised:
                await client.complete("text", max_tokens=3)
        assert raised.value.reason == "NO_REPLICA" and raised.value.metadata["daemon"] == "tokenizer"
        assert (await stub.GetModelInfo(router_pb2.GetModelInfoRequest())).models


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_the_router_dies_and_the_client_goes_on(num_routers: int) -> None:
    async with router_mesh(routers=num_routers) as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.003

        def has_resumed() -> bool:
            return any(submit.attempt >> 16 for submit in mesh.fakes[0].submits)

        async def kill() -> None:
            for i in itertools.count():
                await asyncio.sleep(0.05)
                await mesh.routers[i % num_routers].restart()
                # A slow machine may end a router before any stream has begun.
                if i >= 5 and has_resumed():
                    return

        async with asyncio.timeout(60):
            killer = asyncio.create_task(kill())
            while not killer.done():
                await run_many(client, range(12))
            await killer


async def test_resume_at_every_cut_point() -> None:
    """A stream cut after any number of tokens, with any part of their text received, goes on to the same end."""
    count = 24
    seed = next(seed for seed in range(99) if len(oracle_ids(PROMPT, seed, count)) == count)
    ids = oracle_ids(PROMPT, seed, count)
    text = oracle_text(ids, PROMPT)[0]
    stop = text[-8:-5]
    async with router_mesh(routers=2) as mesh, mesh.stub(0) as first, mesh.stub(1) as second:
        for stops in ((), (stop,)):
            _, counted, found = oracle_text(ids, PROMPT, stops)
            final = oracle_text(ids, PROMPT, stops)[0]
            resolved, snapshots = await _snapshots(first, seed, count, stops)
            for resumption, (have, have_text) in enumerate(snapshots, start=1):
                num_submits = len(mesh.fakes[0].submits)
                request = router_pb2.GenerateRequest(
                    resume=router_pb2.Resume(
                        resolved=resolved,
                        outputs=[
                            router_pb2.OutputProgress(output_ids=pack_ints(have), text_bytes=len(have_text.encode()))
                        ],
                        resumption=resumption,
                    )
                )
                got, got_text, finished = await _collect(second, request, len(have), len(have_text.encode()))
                assert (have + got, have_text + got_text) == (counted, final)
                assert finished.stop == found and finished.num_output == len(counted)
                if len(have) == len(counted):
                    # All ids were known: no scheduler was asked, wherever the end came from.
                    assert len(mesh.fakes[0].submits) == num_submits
        await mesh.settle()


async def _snapshots(stub, seed: int, count: int, stops: tuple[str, ...]):  # type: ignore[no-untyped-def]
    """Text that a client had after each message."""
    request = router_pb2.GenerateRequest(prompt_ids=pack_ints(PROMPT))
    request.sampling.seed = seed
    request.stop.max_tokens = count
    request.stop.stop.extend(stops)
    have: list[int] = []
    text = ""
    snapshots = [([], "")]
    resolved = None
    async for response in stub.Generate(request):
        resolved = resolved or response.resolved
        for delta in response.deltas:
            have = have + unpack_ints(delta.ids, "ids").tolist()
            text += delta.text
            snapshots.append((have, text))
    return resolved, snapshots


async def _collect(stub, request, num_ids: int, num_bytes: int):  # type: ignore[no-untyped-def]
    got: list[int] = []
    text = ""
    finished = None
    async for response in stub.Generate(request):
        for delta in response.deltas:
            assert delta.first_output_index == num_ids + len(got)
            assert delta.text_offset == num_bytes + len(text.encode())
            got += unpack_ints(delta.ids, "ids").tolist()
            text += delta.text
        finished = response.finished[0] if response.finished else finished
    return got, text, finished


async def test_a_finished_output_is_not_mentioned_again_and_others_go_on() -> None:
    async with router_mesh() as mesh, mesh.stub() as stub:
        request = router_pb2.GenerateRequest(prompt_ids=pack_ints(PROMPT), n=2)
        request.sampling.seed = 3
        request.stop.max_tokens = 10
        call = stub.Generate(request)
        resolved = (await call.read()).resolved
        call.cancel()
        whole = oracle_ids(PROMPT, 3, 10)
        resume = router_pb2.Resume(resolved=resolved, resumption=1)
        resume.outputs.add(
            output_ids=pack_ints(whole), text_bytes=len(oracle_text(whole, PROMPT)[0].encode()), is_finished=True
        )
        resume.outputs.add()
        indexes, ids = set(), []
        async for response in stub.Generate(router_pb2.GenerateRequest(resume=resume)):
            for delta in response.deltas:
                indexes.add(delta.index)
                ids += unpack_ints(delta.ids, "ids").tolist()
            indexes |= {finished.index for finished in response.finished}
        assert indexes == {1} and ids == oracle_ids(PROMPT, 3, 10, index=1)


async def test_a_higher_resumption_supersedes_the_stream_that_lives() -> None:
    async with router_mesh() as mesh, mesh.stub() as stub:
        mesh.fakes[0].step_s = 0.01
        request = router_pb2.GenerateRequest(prompt_ids=pack_ints(PROMPT))
        request.sampling.seed = 8
        request.stop.max_tokens = 30
        old = stub.Generate(request)
        resolved = (await old.read()).resolved
        await old.read()
        resume = router_pb2.Resume(resolved=resolved, outputs=[router_pb2.OutputProgress()], resumption=1)
        got, text, _ = await _collect(stub, router_pb2.GenerateRequest(resume=resume), 0, 0)
        assert got == oracle_ids(PROMPT, 8, 30) and text == oracle_text(got, PROMPT)[0]
        with pytest.raises(Exception, match="resumed this request"):
            while await old.read():
                pass
        await mesh.settle()


@pytest.mark.parametrize("fault", ["repeat", "stale", "gap", "short", "late_finish"])
async def test_rows_that_break_the_contract_never_reach_a_client(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The streams break off dozens of times; a second between two of them would be all of this test's time.
    monkeypatch.setattr(peer_link, "MAX_REDIAL_S", 0.05)
    async with router_mesh() as mesh, mesh.client() as client:
        fake, state = mesh.fakes[0], {"num": 0}

        def mangle(frame: scheduler_pb2.ServeResponse) -> None:
            if not frame.tokens.handles:
                return
            state["num"] += 1
            if state["num"] % 7:
                return
            tokens = frame.tokens
            firsts, attempts = unpack_ints(tokens.first_output_indexes, "f"), unpack_ints(tokens.attempts, "a")
            if fault == "repeat":
                tokens.first_output_indexes = pack_ints(firsts - 1)
            elif fault == "gap":
                tokens.first_output_indexes = pack_ints(firsts + 1)
            elif fault == "stale":
                tokens.attempts = pack_ints(attempts - 1)
            elif fault == "short":
                tokens.ids = tokens.ids[:-4]
            elif fault == "late_finish":
                frame.ClearField("tokens")

        fake.mangle = mangle
        await run_many(client, range(12))
        assert fake.num_streams > 1  # The router dropped the stream and asked again.
        await mesh.settle()


async def test_a_silent_scheduler_counts_as_dead() -> None:
    async with router_mesh(schedulers=2, peer_timeout_s=0.6) as mesh, mesh.client() as client:
        for fake in mesh.fakes:
            fake.step_s = 0.005
        work = asyncio.create_task(run_many(client, range(8)))
        await until(lambda: mesh.fakes[0].num_running > 0)
        mesh.fakes[0].is_silent = True
        await work
        assert not mesh.router().schedulers.links[0].is_connected


async def test_requests_wait_for_a_scheduler_and_then_go_on() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        await mesh.schedulers[0].kill()
        await until(lambda: not mesh.router().schedulers.links[0].is_connected)
        waiting = asyncio.create_task(run_many(client, range(6)))
        await until(lambda: mesh.router().schedulers.num_waiting >= 6)
        await mesh.schedulers[0].start()
        await waiting


async def test_a_scheduler_that_never_comes_back_is_an_error_in_the_end() -> None:
    async with router_mesh(scheduler_wait_s=0.3) as mesh, mesh.client() as client:
        await mesh.schedulers[0].kill()
        await until(lambda: not mesh.router().schedulers.links[0].is_connected)
        with pytest.raises(UnavailableError) as raised:
            await client.complete(PROMPT, max_tokens=4)
        assert raised.value.reason == "NO_REPLICA"
        await mesh.settle()


@pytest.mark.parametrize("reason", ["NOT_SERVING", "OVERLOADED", "GROUP_LOST"])
async def test_a_scheduler_that_takes_nothing_is_passed_over(reason: str) -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client:
        mesh.fakes[0].reject = MeshError(
            ErrorReason.Value(f"ERROR_REASON_{reason}"), "not now", {"retry_after_ms": "50"}
        )
        await run_many(client, range(8))
        assert mesh.fakes[0].submits and mesh.fakes[1].submits
        mesh.fakes[1].reject = mesh.fakes[0].reject
        waiting = asyncio.create_task(run_many(client, range(4)))
        await asyncio.sleep(0.3)
        num_submits = len(mesh.fakes[0].submits) + len(mesh.fakes[1].submits)
        assert num_submits < 150  # Asked again, not hammered.
        mesh.fakes[1].reject = None
        await waiting


async def test_a_final_rejection_reaches_the_client() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        mesh.fakes[0].reject = MeshError(
            ErrorReason.ERROR_REASON_NEVER_FITS, "too long for this replica", {"needed_pages": "9", "total_pages": "3"}
        )
        with pytest.raises(Exception, match="too long for this replica") as raised:
            await client.complete(PROMPT, max_tokens=4)
        assert raised.value.reason == "NEVER_FITS" and raised.value.metadata["total_pages"] == "3"  # type: ignore[attr-defined]
        assert len(mesh.fakes[0].submits) == 1
        await mesh.settle()


async def test_requests_leave_a_scheduler_whose_group_does_not_serve() -> None:
    async with router_mesh(schedulers=2, migrate_after_s=0.3) as mesh, mesh.client() as client:
        first = mesh.fakes[0]
        first.is_paused = True
        work = asyncio.create_task(run_many(client, range(8)))
        await until(lambda: first.num_running >= 4)
        first.group = scheduler_pb2.GROUP_STATE_CONNECTING
        await work
        assert first.num_running == 0 and any(abort.HasField("below_attempt") for abort in first.aborts)
        num_before = len(first.submits)
        await run_many(client, range(8))
        assert len(first.submits) == num_before


async def test_a_scheduler_with_another_model_is_no_replacement() -> None:
    async with router_mesh(schedulers=2, scheduler_wait_s=0.5) as mesh, mesh.client() as client:
        for fake in mesh.fakes:
            fake.step_s = 0.01
        work = asyncio.create_task(client.complete(PROMPT, max_tokens=60, seed=1, ignore_eos=True))
        await until(lambda: any(fake.num_running for fake in mesh.fakes))
        busy = 0 if mesh.fakes[0].num_running else 1
        other = mesh.fakes[1 - busy]
        changed = type(MODEL)()
        changed.CopyFrom(MODEL)
        changed.model_fingerprint = "beef"
        other.model = changed
        await mesh.schedulers[1 - busy].restart()
        await connected(mesh.router())
        await mesh.schedulers[busy].kill()
        with pytest.raises(UnavailableError):
            await work
        assert not other.submits


async def test_a_detokenizer_that_hangs_loses_its_entries_to_another() -> None:
    async with router_mesh(detokenizers=2, peer_timeout_s=0.5) as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.005
        work = asyncio.create_task(run_many(client, range(8)))
        links = mesh.router().detokenizers.links
        await until(lambda: links[0].num_entries > 0 and links[1].num_entries > 0)
        await _hang(mesh.detokenizers[0].daemon)
        await work
        # The stream to the one that hangs was ended and dialled again, the other's was not.
        await until(lambda: links[0].num_connects > 1)
        assert links[1].num_connects == 1
        await mesh.settle()


async def _hang(daemon: object) -> None:
    """The detokenizer takes frames and answers none."""

    async def swallow(*_: object) -> None:
        await asyncio.sleep(3600)

    assert isinstance(daemon, DetokenizerDaemon)
    daemon.service.apply = swallow  # type: ignore[method-assign, assignment]


async def test_a_tokenizer_that_hangs_is_not_waited_for() -> None:
    async with router_mesh(tokenizers=2, tokenizer_hedge_s=0.1) as mesh, mesh.client() as client:
        expected = await client.tokenize("the end")
        await mesh.tokenizers[0].kill()
        # Somebody listens there and never says a word.
        server = await asyncio.start_unix_server(lambda r, w: None, mesh.tokenizers[0].address.removeprefix("unix:"))
        started = asyncio.get_running_loop().time()
        for _ in range(4):
            assert await client.tokenize("the end") == expected
        assert asyncio.get_running_loop().time() - started < 8, "two of the four would wait for five seconds each"
        server.close()


async def test_a_rejection_long_ago_does_not_shorten_the_wait_for_a_scheduler_that_dies() -> None:
    async with router_mesh(scheduler_wait_s=1.5) as mesh, mesh.client() as client:
        fake = mesh.fakes[0]
        fake.step_s = 0.05
        fake.reject = MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "full")
        running = asyncio.ensure_future(client.complete(PROMPT, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True))
        await until(lambda: bool(fake.submits))
        fake.reject = None
        await asyncio.sleep(1.6)
        assert fake.num_running == 1
        await mesh.schedulers[0].kill()
        await asyncio.sleep(0.3)
        await mesh.schedulers[0].start()
        async with asyncio.timeout(20):
            done = await running
        assert len(done.outputs[0].ids) == MAX_TOKENS


async def test_thousands_that_wait_for_a_scheduler_cost_next_to_nothing() -> None:
    async with router_mesh() as mesh:
        pool = mesh.router().schedulers
        mesh.fakes[0].reject = MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "full", {"retry_after_ms": "2000"})
        async with mesh.client() as client:
            waiting = asyncio.ensure_future(client.complete(PROMPT, seed=1, max_tokens=4))
            await until(lambda: pool.num_waiting == 1)
            (output,) = pool.waiting
            await mesh.schedulers[0].kill()
            await until(lambda: not pool.links[0].is_connected)
            placed: list[object] = []
            place = pool.place

            def counted(one: Output) -> None:
                placed.append(one)
                place(one)

            pool.place = counted  # type: ignore[method-assign]
            await asyncio.sleep(1.0)
            assert len(placed) <= 1, "nothing has changed: nobody is asked ten times a second"
            mesh.fakes[0].reject = None
            await mesh.schedulers[0].start()
            async with asyncio.timeout(60):
                done = await waiting
            assert placed and output.ids.tolist() == done.outputs[0].ids
