"""The language of the Python client against a real mesh on the tiny model: its page, selection, forks, kills."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import docs_pages
from support.docs_pages import ROOT
from support.jobs import recitations
from support.mesh import Mesh
from support.oracle import Oracle

from radixmesh.client import Client, errors
from radixmesh.client.lang import (
    assistant,
    function,
    gen,
    greedy_token_selection,
    select,
    token_length_normalized,
    unconditional_likelihood_normalized,
    user,
)
from radixmesh.client.lang.choices import Scored, mean_logprobs

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = ROOT / "docs" / "language.md"
CHOICES = [" les sanglots longs", " a", " zzz zzz"]


@pytest.fixture
def client(mesh: Mesh) -> Iterator[Client]:
    with Client(mesh.routers) as client:
        yield client


@pytest.mark.parametrize("number", range(len(docs_pages.snippets(PAGE, "python"))))
async def test_the_page_runs_as_printed(mesh: Mesh, number: int, tmp_path: Path) -> None:
    text = docs_pages.snippets(PAGE, "python")[number].replace("127.0.0.1:50050", mesh.routers[0])
    (tmp_path / "snippet.py").write_text(text)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "snippet.py", cwd=tmp_path, stdout=pipe, stderr=pipe)
    printed, errors_ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0 and printed.strip(), errors_.decode()


@function
def choose(s: Any, text: str, method: Any) -> None:
    s += text + select("choice", CHOICES, method)


async def test_select_takes_the_highest_mean_of_the_logprobs_that_transformers_gives(
    mesh: Mesh, client: Client
) -> None:
    """The logprobs of a choice are those of the whole text's tokens behind the prefix."""
    text = recitations(with_sampled=False)[0].prompt
    assert isinstance(text, str)
    state = await asyncio.to_thread(choose.run, text, greedy_token_selection, client=client)
    scored = state.output("choice")
    assert isinstance(scored, Scored)
    oracle = Oracle("tiny-llama")
    prefix = await mesh.client.tokenize(text)
    for choice, values in zip(CHOICES, scored.conditional, strict=True):
        ids = await mesh.client.tokenize(text + choice)
        assert ids[: len(prefix)] == prefix, "no token is healed here"
        want = oracle.prompt_logprobs(ids)[len(prefix) - 1 :]
        assert values == pytest.approx(list(want), abs=2e-4)
    state = await asyncio.to_thread(choose.run, text, token_length_normalized, client=client)
    means = mean_logprobs(scored)
    assert state["choice"] == CHOICES[means.index(max(means))] and state.text() == text + state["choice"]
    state = await asyncio.to_thread(choose.run, text, unconditional_likelihood_normalized, client=client)
    assert state["choice"] in CHOICES


async def test_logprobs_from_a_later_position_leave_the_rest_to_the_cache(mesh: Mesh) -> None:
    prompt = [5 + 7 * index % 400 for index in range(200)]
    whole = await mesh.client.complete(prompt, max_tokens=1, prompt_logprobs=True)
    assert whole.prompt_logprobs is not None and len(whole.prompt_logprobs.token_logprobs) == 199
    for start in (1, 150, 199, 200, 5000):
        part = await mesh.client.complete(prompt, max_tokens=1, prompt_logprobs=True, prompt_logprobs_start=start)
        got = [] if part.prompt_logprobs is None else part.prompt_logprobs.token_logprobs
        assert got == whole.prompt_logprobs.token_logprobs[start - 1 :]
        finish = part.outputs[0].finish
        assert finish is not None
        # All but the token that predicts the first of them; the last token is always computed.
        assert finish.usage.cached_tokens >= min(start - 1, 199) - 16
    with pytest.raises(errors.InvalidRequestError, match="prompt_logprobs_start"):
        await mesh.client.complete(prompt, prompt_logprobs=True, prompt_logprobs_start=1 << 31)


@function
def branch(s: Any, title: str, width: int) -> None:
    s += title
    forks = s.fork(width)
    forks += " then" + gen("end", max_tokens=6, ignore_eos=True)
    forks.join()
    s += " Last:" + gen("last", max_tokens=4, ignore_eos=True)


async def test_forks_equal_separate_requests_and_take_their_prefix_from_the_cache(mesh: Mesh, client: Client) -> None:
    title = "I met a traveller from an antique land, " * 12
    state = await asyncio.to_thread(branch.run, title, 6, client=client, options={"temperature": 0})
    alone = await mesh.client.complete(
        title + " then", max_tokens=6, temperature=0, ignore_eos=True, cache_salt="other"
    )
    assert state["end"] == [alone.text] * 6
    num_prompt = len(await mesh.client.tokenize(title))
    # One of six computes it, and the last generation has it too.
    assert state.usage.cached_tokens >= 5 * (num_prompt - 16)


async def test_a_fork_shows_the_text_of_what_it_inherits(client: Client) -> None:
    @function
    def forked(s: Any) -> str:
        s += "Once" + gen("first", max_tokens=6, ignore_eos=True)
        (fork,) = s.fork(1)
        return "".join(fork.text_iter("first"))

    async with asyncio.timeout(60):
        state = await asyncio.to_thread(forked.run, client=client)
    assert state.result == state["first"] != ""


async def test_a_seed_makes_runs_equal_and_forks_differ(client: Client) -> None:
    def run() -> list[str]:
        options = {"seed": 5, "temperature": 1.0}
        return branch.run("Once", 4, client=client, options=options)["end"]  # type: ignore[arg-type, no-any-return]

    first, again = [await asyncio.to_thread(run) for _ in range(2)]
    assert first == again and len(set(first)) > 1


async def test_roles_give_what_a_chat_request_gives(mesh: Mesh, client: Client) -> None:
    job = next(job for job in recitations(with_sampled=False) if job.messages is not None)
    assert job.messages is not None

    @function
    def chat(s: Any) -> None:
        for message in job.messages or ():
            s += {"user": user, "assistant": assistant}[str(message["role"])](str(message["content"]))
        s += assistant(gen("answer"))

    state = await asyncio.to_thread(chat.run, client=client, options={"temperature": 0})
    assert state["answer"] == job.answers[0].text
    assert state.messages() == [*job.messages, {"role": "assistant", "content": state["answer"]}]


async def test_a_stream_shows_the_text_before_the_program_ends(client: Client) -> None:
    goes_on = threading.Event()

    @function
    def slow(s: Any) -> str:
        s += "Once" + gen("first", max_tokens=6, ignore_eos=True)
        assert goes_on.wait(60)
        s += " more" + gen("second", max_tokens=6, ignore_eos=True)
        return "result"

    def follow() -> tuple[str, str, str]:
        state = slow.run(client=client, stream=True)
        first = "".join(state.text_iter("first"))
        goes_on.set()
        text = "".join(state.text_iter())
        assert state.result == "result"
        return first, text, state["second"]

    first, text, second = await asyncio.to_thread(follow)
    assert text == "Once" + first + " more" + second and second


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda s: s.fork(1025), "INVALID_ARGUMENT"),
        (lambda s: [fork.fork(1024) for fork in s.fork(16)], "TOO_LARGE"),
        (lambda s: s.__iadd__(user("a") + "b"), "INVALID_CHAT"),
        (lambda s: s.__iadd__("b" + user("a")), "INVALID_CHAT"),
        (lambda s: s.__iadd__(user(gen("a"))), "INVALID_CHAT"),
        (lambda s: s.__iadd__(user(user("a"))), "INVALID_CHAT"),
        (lambda s: s.__iadd__("a" + gen("x", regex="(")), "INVALID_GRAMMAR"),
        (lambda s: s.__iadd__(gen("x", choices=["a"] * 2)), "INVALID_ARGUMENT"),
        (lambda s: s.__iadd__(gen("x", n=2)), "INVALID_ARGUMENT"),
        (lambda s: s.__iadd__(select("x", [str(i) for i in range(257)])), "INVALID_ARGUMENT"),
    ],
)
async def test_mistakes_have_typed_errors(client: Client, body: Any, reason: str) -> None:
    with pytest.raises(errors.RadixMeshError) as caught:
        await asyncio.to_thread(function(body).run, client=client)
    assert caught.value.reason == reason


async def test_failures_of_a_batch_are_kept_or_raised(client: Client) -> None:
    @function
    def fails(s: Any, number: int) -> None:
        s += "a" + gen("x", max_tokens=2 if number != 1 else 0)
        s += gen("y", max_tokens=2)

    batch = [{"number": number} for number in range(3)]
    states = await asyncio.to_thread(fails.run_batch, batch, client=client, return_exceptions=True)
    assert [state.error is not None for state in states] == [False, True, False]
    with pytest.raises(errors.InvalidRequestError):
        await asyncio.to_thread(fails.run_batch, batch, client=client)
    with pytest.raises(KeyError):
        await asyncio.to_thread(states[0].get, "z")


async def test_an_exception_of_the_program_ends_its_requests(mesh: Mesh, client: Client) -> None:
    @function
    def dies(s: Any) -> None:
        s += "a" + gen("x", max_tokens=1500, ignore_eos=True)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await asyncio.to_thread(dies.run, client=client)
    async with asyncio.timeout(60):
        while (await mesh.scheduler_state()).load.num_running:
            await asyncio.sleep(0.05)


async def test_kills_change_nothing(mesh: Mesh, client: Client) -> None:
    options: Any = {"seed": 11, "temperature": 1.0}
    batch = [{"title": f"{number}. I met a traveller", "width": 3} for number in range(12)]

    def texts() -> list[tuple[str, list[str]]]:
        states = branch.run_batch(batch, client=client, options=options, concurrency=4)
        return [(state.text(), state["end"]) for state in states]

    known = await asyncio.to_thread(texts)
    pick = random.Random(3)
    # The client talks to the one, and its forks lie in the other; the rest dies under recitations.
    for service in ("router", "worker"):
        running = asyncio.create_task(asyncio.to_thread(texts))
        await asyncio.sleep(pick.uniform(0.05, 0.5))
        assert mesh.cluster.kill(service, 1, signal.SIGKILL)
        assert await asyncio.wait_for(running, 120) == known, service
        await mesh.cluster.wait_healthy(60)
    assert all(re.match(r"\d+\. I met", text) for text, _ in known)
