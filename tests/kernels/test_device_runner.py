"""The GPU's runner on the host, its operations replaced by their references: the same tokens as the CPU worker's."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.step import Admit, Chunk, Grant, Release, StepPlan
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PAGES = 512
PROMPTS = [list(range(20, 20 + n)) for n in (1, 5, 17, 30)]
OPTIONS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=7, top_k=20, top_p=0.9),
    Sampling(temperature=1.0, seed=2**63 + 5),
    Sampling(temperature=0.0, repetition_penalty=1.3, logit_bias=((40, 5.0),)),
    Sampling(temperature=0.7, seed=3, min_p=0.05, frequency_penalty=0.5, presence_penalty=0.2),
    Sampling(temperature=0.0, num_top_logprobs=3, prompt_logprobs=True),
]


class Driver:
    """Sends the same plans to an executor: chunked prefills beside decodes, one request after the other."""

    def __init__(self, runner: ModelRunner, *, page_size: int, lag: int) -> None:
        self.executor = StepExecutor(runner, num_slots=8, max_tokens_per_step=64)
        self.executor.begin_epoch(1)
        self.page_size, self.lag = page_size, lag
        self.launched: deque = deque()
        self.tokens: dict[int, list[int]] = {}
        self.results: list = []
        self.rows: deque = deque()
        self.decodes: list[int] = []
        self.step = 0
        self.next_page = 0

    def run(self, chunks=(), admits=(), grants=(), releases=()):
        self.step += 1
        finishing = [chunk.slot for chunk, is_last in chunks if is_last]
        plan = StepPlan(
            epoch=1,
            step_id=self.step,
            admits=tuple(admits),
            grants=tuple(grants),
            releases=tuple(releases),
            chunks=tuple(chunk for chunk, _ in chunks),
            decode_set=np.array(self.decodes, np.int32),
        )
        self.launched.append(self.executor.launch(plan))
        self.rows.append([*self.decodes, *finishing])
        while len(self.launched) > self.lag:
            self.take()

    def take(self):
        result = self.launched.popleft().finish()
        self.results.append(result)
        ids = iter(result.ids.tolist())
        for slot, count in zip(self.rows.popleft(), result.counts.tolist(), strict=True):
            self.tokens[slot] += [next(ids) for _ in range(count)]

    def add(self, slot: int, prompt: list[int], sampling: Sampling, chunk_len: int, num_out: int) -> None:
        total = len(prompt) + num_out
        pages = np.arange(self.next_page, self.next_page - (-total // self.page_size), dtype=np.int32)[::-1].copy()
        self.next_page += len(pages)
        admit = Admit(
            slot=slot,
            generation=1,
            request_id=f"r{slot}",
            prompt_ids=np.array(prompt, np.int32),
            max_total_len=total,
            sampling=sampling,
            min_tokens=4,
            suppressed_ids=np.array([1, 33], np.int32),
        )
        self.tokens[slot] = []
        for start in range(0, len(prompt), chunk_len):
            length = min(chunk_len, len(prompt) - start)
            is_first, is_last = start == 0, start + length == len(prompt)
            self.run(
                chunks=[(Chunk(slot=slot, length=length), is_last)],
                admits=[admit] if is_first else [],
                grants=[Grant(slot=slot, pages=pages)] if is_first else [],
            )
        self.decodes.append(slot)

    def finish(self, num_steps: int) -> dict[int, list[int]]:
        for _ in range(num_steps):
            self.run()
        self.run(releases=[Release(slot=self.decodes.pop(0), generation=1)])
        while self.launched:
            self.take()
        return self.tokens


def _tokens(runner: ModelRunner, *, page_size: int, chunk_len: int, lag: int) -> Driver:
    driver = Driver(runner, page_size=page_size, lag=lag)
    for slot, sampling in enumerate(OPTIONS):
        driver.add(slot, PROMPTS[slot % len(PROMPTS)], sampling, chunk_len, num_out=24)
    driver.finish(6)
    return driver


def _device_runner(page_size: int) -> ModelRunner:
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_device_runner

    settings = DeviceSettings(
        dtype="float32",
        attention_backend="torch",
        load_format="auto",
        page_size=page_size,
        num_pages=PAGES,
        num_slots=8,
        max_tokens_per_step=64,
        max_total_len=128,
        mem_fraction=0.5,
        cuda_graphs=False,
        use_pdl=False,
        deterministic=False,
    )
    return load_device_runner(MODEL, settings, HostDevice())


def _cpu_runner(page_size: int) -> ModelRunner:
    return load_cpu_runner(
        MODEL,
        page_size=page_size,
        num_pages=PAGES,
        threads=1,
        is_deterministic=True,
        attention_backend="paged_torch",
        dtype="float32",
        max_total_len=128,
        embed_pooling="mean",
    )


@pytest.mark.parametrize(("page_size", "chunk_len", "lag"), [(1, 7, 2), (4, 64, 1)])
def test_tokens_and_logprobs_are_those_of_the_cpu_worker(page_size, chunk_len, lag):
    want = _tokens(_cpu_runner(page_size), page_size=page_size, chunk_len=chunk_len, lag=0)
    got = _tokens(_device_runner(page_size), page_size=page_size, chunk_len=chunk_len, lag=lag)
    assert got.tokens == want.tokens
    assert all(len(tokens) > 5 for tokens in got.tokens.values())
    for one, other in zip(got.results, want.results, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert [(p.slot, p.first_position) for p in ours] == [(p.slot, p.first_position) for p in theirs]
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a.logprobs.own, b.logprobs.own, atol=1e-4)
                np.testing.assert_allclose(a.logprobs.top, b.logprobs.top, atol=1e-4)
    assert any(result.logprobs for result in got.results) and any(result.prompt_logprobs for result in got.results)
    ours, theirs = got.executor.snapshot()[0], want.executor.snapshot()[0]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.filled, b.filled)
