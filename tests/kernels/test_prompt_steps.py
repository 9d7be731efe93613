"""Steps with chunks, captured and not: the same tokens of any mix of decodes and chunks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.plan_driver import GREEDY, OPTIONS, PLAIN_OPTIONS, PlanDriver, check_same, drive, logprob_tolerance
from support.replaying_device import ReplayingDevice

from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, StepPlan
from radixmesh.daemons.worker.cuda import load
from radixmesh.daemons.worker.cuda.attention.torch_attention import TorchAttention
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.step import prompt_steps
from radixmesh.daemons.worker.cuda.step.host_step import host_step
from radixmesh.daemons.worker.cuda.step.prompt_steps import PromptSteps, default_prompt_rows, no_rows
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import Segment

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
MAX_TOKENS = 70
SLOTS = 6
HIDDEN = 128


def _runner(device, *, attention="torch", page_size=1, deterministic=False):
    settings = replace(
        TINY_SETTINGS,
        attention_backend=attention,
        page_size=page_size,
        num_pages=1024,
        num_slots=SLOTS,
        max_tokens_per_step=MAX_TOKENS,
        cuda_graphs=True,
        deterministic=deterministic,
    )
    runner = load_device_runner(MODEL, settings, device)
    if device.can_capture:
        runner.warm_up()
        # Captures replay once.
        device.replayed.clear()
    return runner


def _mixed_tokens(runner, rng, *, num_steps=8):
    """Ids of every step of a script in which requests come two at a time, their prompts in chunks of any lengths."""
    executor = StepExecutor(runner, num_slots=SLOTS, max_tokens_per_step=MAX_TOKENS)
    executor.begin_epoch(1)
    size, left, decodes, all_ids, next_page = runner.page_size, {}, [], [], 0
    for step in range(1, num_steps + 1):
        admits, grants = [], []
        for slot in range(2 * step - 2, 2 * step) if step <= SLOTS // 2 else ():
            left[slot] = int(rng.integers(1, 40))
            num_pages = -(-(left[slot] + 30) // size)
            admits.append(
                Admit(
                    slot=slot,
                    generation=1,
                    request_id=f"r{slot}",
                    prompt_ids=rng.integers(2, 700, left[slot]).astype(np.int32),
                    max_total_len=left[slot] + 30,
                    sampling=OPTIONS[2 if slot == 1 else 0],
                )
            )
            pages = np.arange(next_page, next_page + num_pages, dtype=np.int32)[::-1].copy()
            grants.append(Grant(slot=slot, pages=pages))
            next_page += num_pages
        room, chunks = MAX_TOKENS - len(decodes), []
        for slot in left:
            length = min(left[slot], room, int(rng.integers(1, 30)))
            if length:
                chunks.append(Chunk(slot=slot, length=length))
                room -= length
        plan = StepPlan(
            epoch=1,
            step_id=step,
            admits=tuple(admits),
            grants=tuple(grants),
            chunks=tuple(chunks),
            decode_set=np.array(decodes, np.int32),
        )
        all_ids.append(executor.run(plan).ids.tolist())
        for chunk in chunks:
            left[chunk.slot] -= chunk.length
            if not left[chunk.slot]:
                del left[chunk.slot]
                decodes.append(chunk.slot)
    assert not left and len(decodes) == SLOTS
    return all_ids


def _captured_rows(device):
    """Rows of the steps with chunks that were replayed; they leave hidden states, not logits."""
    return {rows for rows, width in device.replayed if width == HIDDEN}


@pytest.mark.parametrize(("seed", "page_size"), [(0, 1), pytest.param(1, 4, marks=pytest.mark.full)])
def test_any_mix_in_a_captured_step_gives_the_tokens_of_one_that_is_launched(monkeypatch, seed, page_size):
    want = _mixed_tokens(_runner(HostDevice(), page_size=page_size), np.random.default_rng(seed))
    monkeypatch.setattr(TorchAttention, "captures_chunks", True)
    device = ReplayingDevice()
    got = _mixed_tokens(_runner(device, page_size=page_size), np.random.default_rng(seed))
    assert got == want and _captured_rows(device) >= {32, 64}


@pytest.fixture
def few_sizes(monkeypatch):
    """Shapes that take little of Triton's interpreter."""
    monkeypatch.setattr(load, "default_graph_rows", lambda num_slots: ())
    monkeypatch.setattr(load, "default_prompt_rows", lambda max_tokens: (64,))
    monkeypatch.setattr(prompt_steps, "WARM_LENGTHS", (1,))


# The interpreter takes a minute for this; tests/gpu/test_cuda_runner.py captures the same on a GPU.
@pytest.mark.full
def test_the_kernels_read_all_that_differs_on_the_device(few_sizes):
    want = _mixed_tokens(_runner(HostDevice()), np.random.default_rng(3), num_steps=6)
    device = ReplayingDevice()
    got = _mixed_tokens(_runner(device, attention="triton"), np.random.default_rng(3), num_steps=6)
    assert got == want and _captured_rows(device) == {64}


def test_chunks_are_decodes_in_a_captured_step_of_the_deterministic_mode(monkeypatch, few_sizes):
    monkeypatch.setattr(load, "default_prompt_rows", lambda max_tokens: (8,))

    def tokens(runner):
        driver = PlanDriver(runner, lag=0, num_slots=SLOTS, max_tokens_per_step=MAX_TOKENS)
        driver.add(0, list(range(20, 25)), GREEDY, chunk_len=3, num_out=4)
        driver.finish(0)
        return driver.tokens

    device = ReplayingDevice()
    assert tokens(_runner(device, attention="triton", deterministic=True)) == tokens(_runner(HostDevice()))
    assert _captured_rows(device) == {8}


def test_logprobs_of_a_captured_step_outlive_the_next_ones(monkeypatch):
    want = drive(_runner(HostDevice()), chunk_len=7, lag=0, options=PLAIN_OPTIONS)
    monkeypatch.setattr(TorchAttention, "captures_chunks", True)
    device = ReplayingDevice()
    got = drive(_runner(device), chunk_len=7, lag=2, options=PLAIN_OPTIONS)
    check_same(got, want, atol=logprob_tolerance(MODEL))
    assert _captured_rows(device) == {16}


def test_attention_that_plans_chunks_on_the_host_has_none_captured():
    device = ReplayingDevice()
    _mixed_tokens(_runner(device), np.random.default_rng(0))
    assert device.replayed and not _captured_rows(device)


@pytest.mark.parametrize(("max_tokens", "num_slots"), [(1, 1), (2, 1), (3, 2), (16, 4)])
def test_the_numbers_of_the_smallest_graphs_fit_their_buffer(max_tokens, num_slots):
    steps = PromptSteps(
        HostDevice(),
        *(None, TorchAttention(None, page_size=1), SimpleNamespace(dummy_slot=num_slots), None),
        page_size=1,
        max_tokens=max_tokens,
        max_total_len=8,
        sizes=default_prompt_rows(max_tokens),
    )
    segment = Segment(slot=0, ids=np.array([5], np.int32), start=2, pages=np.arange(3, dtype=np.int32))
    for size in default_prompt_rows(max_tokens):
        shape, rows = steps.shape_of(size), no_rows()
        step = host_step(rows, (segment,), shape.num_decodes)
        sampled = steps.buffer.upload(shape, step, rows, (segment,), [0], 7)
        assert (sampled.positions.tolist(), sampled.ring_index_1.tolist()) == ([3], [7])


def test_sizes_end_with_the_largest_step():
    assert default_prompt_rows(100) == (16, 32, 64, 100)
    assert default_prompt_rows(8192)[-1] == 1024
