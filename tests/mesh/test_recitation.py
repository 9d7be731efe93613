"""The tiny model through the whole mesh against transformers: token for token, however the work is cut and mixed."""

import asyncio
import itertools
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from support.jobs import MODEL, MODELS, Answer, Job, recitations
from support.mesh import Mesh, running_mesh
from support.oracle import Oracle
from support.plan_driver import logprob_tolerance
from tokenizers import Tokenizer

from radixmesh.client.tracker import Tracker
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.sampling import Sampling, output_seed
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

NUM_SAMPLED_TOKENS = 96
FULL_MATRIX = list(itertools.product([1, 16], [1, 7, 64], [0, 1, 2]))
# Every value of every axis in three starts; every combination is in the full matrix. Greedy jobs from [0] in steps of
# the last number: the first 22 are pairs that recite one text after a title and after its first line, the third of
# them more than a thousand tokens.
DAILY = [(1, 1, 2, 3), (16, 7, 1, 4), (1, 64, 0, 3)]


@dataclass(frozen=True, slots=True)
class SampledCase:
    name: str
    prompt_ids: list[int]
    sampling: Sampling


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def sampled(oracle: Oracle) -> list[Job]:
    return sampled_jobs("tiny-llama", oracle)


@pytest.fixture(scope="module")
def sampled_deepseek() -> list[Job]:
    return sampled_jobs("tiny-deepseek", Oracle("tiny-deepseek"))


def sampled_jobs(model: str, oracle: Oracle) -> list[Job]:
    """Sampled requests with logprobs, n = 2 on half of them, answered by transformers and the sampler."""
    folder = MODELS / model
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    entries = {entry["name"]: entry for entry in json.loads((folder / "recitations.json").read_text())}
    cases = [
        SampledCase("the-tyger", entries["the-tyger"]["prompt_ids"], Sampling(seed=33)),
        SampledCase("lorelei", entries["lorelei"]["prompt_ids"], Sampling(seed=2**63 + 5, top_k=30, top_p=0.95)),
        SampledCase(
            "sonnet-18",
            entries["sonnet-18"]["prompt_ids"],
            Sampling(seed=0, temperature=1.3, min_p=0.02, repetition_penalty=1.1, frequency_penalty=0.2),
        ),
        SampledCase(
            "genesis-1",
            entries["genesis-1"]["prompt_ids"] + entries["genesis-1"]["expected_ids"][:300],
            Sampling(seed=7, presence_penalty=0.3, logit_bias=((17, 1.5), (204, -2.0))),
        ),
    ]
    jobs = []
    for number, case in enumerate(cases):
        num_outputs = 1 + number % 2
        answers = []
        for index in range(num_outputs):
            sampling = replace(case.sampling, seed=output_seed(case.sampling.seed or 0, index))
            reference = oracle.continue_with(case.prompt_ids, sampling, NUM_SAMPLED_TOKENS)
            text = tokenizer.decode(reference.ids, skip_special_tokens=True)
            answers.append(Answer(ids=tuple(reference.ids), text=text, reason="length"))
        s = case.sampling
        jobs.append(
            Job(
                name=f"sampled.{case.name}",
                prompt=case.prompt_ids,
                options={
                    "n": num_outputs,
                    "max_tokens": NUM_SAMPLED_TOKENS,
                    "ignore_eos": True,
                    "temperature": s.temperature,
                    "seed": s.seed,
                    "top_k": s.top_k,
                    "top_p": s.top_p,
                    "min_p": s.min_p,
                    "repetition_penalty": s.repetition_penalty,
                    "frequency_penalty": s.frequency_penalty,
                    "presence_penalty": s.presence_penalty,
                    "logit_bias": dict(s.logit_bias),
                },
                answers=tuple(answers),
            )
        )
    return jobs


async def check_all(mesh: Mesh, jobs: list[Job], *, alone: list[Job]) -> None:
    """`alone` one after the other, then `jobs` all at once."""
    for job in alone:
        assert await job.run(mesh.client) == job.answers, f"{job.name} alone"
    got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
    wrong = [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers]
    assert wrong == [], f"{len(wrong)} of {len(jobs)} differ among {len(jobs)} at once"


async def check_configuration(
    page_size: int, chunk: int, depth: int, sampled: list[Job], *, model: str = "tiny-llama", step: int = 1
) -> None:
    greedy = recitations(model, with_sampled=False)
    jobs = greedy[:22:step] + greedy[22:28] + sampled
    alone = [greedy[2], greedy[23], *sampled]
    settings = {"pipeline_depth": depth, "chunk_tokens": chunk}
    async with running_mesh("cpu", model=model, worker={"page_size": page_size}, scheduler=settings) as mesh:
        await check_all(mesh, jobs, alone=alone)
        state = await mesh.scheduler_state()
        assert state.num_page_violations == 0
        assert state.owned_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "chunk", "depth", "step"), DAILY)
async def test_recites_like_transformers(page_size: int, chunk: int, depth: int, step: int, sampled: list[Job]) -> None:
    await check_configuration(page_size, chunk, depth, sampled, step=step)


@pytest.mark.full
@pytest.mark.parametrize(("page_size", "chunk", "depth"), FULL_MATRIX)
async def test_recites_like_transformers_in_every_configuration(
    page_size: int, chunk: int, depth: int, sampled: list[Job]
) -> None:
    await check_configuration(page_size, chunk, depth, sampled)


@pytest.mark.slow
async def test_a_model_of_deepseeks_shape_recites_too(sampled_deepseek: list[Job]) -> None:
    await check_configuration(16, 64, 2, sampled_deepseek, model="tiny-deepseek", step=4)


@pytest.mark.full
@pytest.mark.parametrize(("page_size", "chunk", "depth"), FULL_MATRIX)
async def test_a_model_of_deepseeks_shape_recites_in_every_configuration(
    page_size: int, chunk: int, depth: int, sampled_deepseek: list[Job]
) -> None:
    await check_configuration(page_size, chunk, depth, sampled_deepseek, model="tiny-deepseek")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "depth", "step"),
    [(1, 2, 3), *(pytest.param(*case, 1, marks=pytest.mark.full) for case in [(1, 2), (16, 1)])],
)
async def test_retraction_changes_nothing(page_size: int, depth: int, step: int, sampled: list[Job]) -> None:
    """32 requests that need some 12,000 tokens of KV share 2,400, or a third of both: most of them lose their
    pages on the way."""
    jobs = recitations(with_sampled=False)[:28:step] + sampled[::step]
    worker = {"page_size": page_size, "num_pages": 2400 // step // page_size}
    async with running_mesh("cpu", worker=worker, scheduler={"pipeline_depth": depth, "chunk_tokens": 64}) as mesh:
        await check_all(mesh, jobs, alone=[])
        state = await mesh.scheduler_state()
        assert state.num_retractions > 0
        assert (state.num_page_violations, state.owned_pages) == (0, 0)


@pytest.mark.slow
async def test_logprobs_are_those_of_transformers(oracle: Oracle) -> None:
    """Damage to KV that leaves the greedy token alone shows here."""
    entry = next(e for e in json.loads((MODEL / "recitations.json").read_text()) if e["name"] == "lorelei")
    prompt = entry["prompt_ids"] + entry["expected_ids"][:150]
    want = oracle.continue_with(prompt, Sampling(seed=3), 64)
    want_prompt = oracle.prompt_logprobs(prompt)
    atol = logprob_tolerance(MODEL, num_keys=len(prompt) + 64)
    async with running_mesh("cpu", worker={"page_size": 4}, scheduler={"chunk_tokens": 24}) as mesh:
        for _ in range(2):  # The second time the prompt's pages could come from the cache.
            got = await mesh.client.complete(
                prompt, seed=3, max_tokens=64, ignore_eos=True, logprobs=2, prompt_logprobs=True
            )
            output = got.outputs[0]
            assert output.ids == want.ids
            assert output.logprobs is not None
            assert got.prompt_logprobs is not None
            np.testing.assert_allclose(output.logprobs.token_logprobs, want.logprobs, rtol=0, atol=atol)
            np.testing.assert_allclose(got.prompt_logprobs.token_logprobs, want_prompt, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
async def test_resume_at_every_cut_point(every: int) -> None:
    """A stream is cut after each of its messages and continued by another router, which never saw the request.

    every: between the first messages and the last ones, only after so many."""
    # The greedy ones end before their bound, at a stop token; each cut is answered to the end.
    requests = [
        {"prompt": "furu-ike", "temperature": 0.0},
        {"prompt": "chat.emoji", "temperature": 0.0},
        {"prompt": "chat.json", "temperature": 1.0, "n": 2, "seed": 5, "max_tokens": 32},
    ]
    entries = {entry["name"]: entry for entry in json.loads((MODEL / "recitations.json").read_text())}
    async with running_mesh("cpu", scale={"router": 2}) as mesh:
        for options in requests:
            request = router_pb2.GenerateRequest(
                request_id=f"cut-{options['prompt']}", n=options.get("n"), prompt_ids=b""
            )
            request.prompt_ids = np.array(entries[options["prompt"]]["prompt_ids"], "<i4").tobytes()
            request.sampling.temperature = options["temperature"]
            request.sampling.seed = options.get("seed", 0)
            request.stop.max_tokens = options.get("max_tokens", 48)
            request.sampling.num_top_logprobs = 1
            await cut_everywhere(mesh, request, every)


async def cut_everywhere(mesh: Mesh, request: router_pb2.GenerateRequest, every: int) -> None:
    async with open_channel(mesh.routers[0]) as one, open_channel(mesh.routers[1]) as other:
        first, second = router_pb2_grpc.RouterServiceStub(one), router_pb2_grpc.RouterServiceStub(other)
        whole = [response async for response in first.Generate(request)]
        # A busy machine sends several tokens in one.
        assert len(whole) > 8, "too few messages to cut between"
        expected = _outputs(whole)
        for cut in sorted({*range(1, 4), *range(len(whole) - 3, len(whole)), *range(1, len(whole), every)}):
            before = whole[:cut]
            tracker = Tracker()
            for response in before:
                tracker.take(response)
            after = [
                response async for response in second.Generate(router_pb2.GenerateRequest(resume=tracker.resume()))
            ]
            assert _outputs([*before, *after]) == expected, f"cut after message {cut} of {len(whole)}"


def _outputs(responses: list[router_pb2.GenerateResponse]) -> dict[int, tuple[bytes, str, bytes, object]]:
    """ids, text, logprobs and finish by index; asserts that deltas follow each other without gap or repetition."""
    outputs: dict[int, tuple[bytes, str, bytes, object]] = {}
    for response in responses:
        for delta in response.deltas:
            ids, text, logprobs, finish = outputs.get(delta.index, (b"", "", b"", None))
            assert delta.first_output_index == len(ids) // 4
            assert delta.text_offset == len(text.encode())
            values = logprobs + delta.logprobs.token_logprobs
            outputs[delta.index] = (ids + delta.ids, text + delta.text, values, finish)
        for end in response.finished:
            ids, text, logprobs, finish = outputs.get(end.index, (b"", "", b"", None))
            assert finish is None
            outputs[end.index] = (ids, text, logprobs, (end.reason, end.num_output, end.text_bytes, end.stop_id))
    return outputs
