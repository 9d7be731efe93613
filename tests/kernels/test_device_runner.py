"""The GPU's runner on the host, its operations replaced by their references: the same tokens as the CPU worker's."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.drafting import check_same_outputs, drafter_of, drive_long, outputs_of
from support.plan_driver import (
    GREEDY,
    OPTIONS,
    PLAIN_OPTIONS,
    PROMPTS,
    PlanDriver,
    check_same,
    drive,
    logprob_tolerance,
)

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, StepPlan
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner, StepOutput
from radixmesh.daemons.worker.speculation.drafter import EachRow
from radixmesh.daemons.worker.step_handle import StepHandle

pytestmark = [
    # A minute each where the machine does other work too.
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="on the host it samples under Triton's interpreter; tests/gpu/test_cuda_runner.py is for the GPU",
    ),
]

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PAGES = 512


def _device_runner(page_size: int, **changes: object) -> ModelRunner:
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    settings = replace(
        TINY_SETTINGS,
        page_size=page_size,
        num_pages=PAGES,
    )
    return load_device_runner(MODEL, replace(settings, **changes), HostDevice())  # type: ignore[arg-type]


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
    want = drive(_cpu_runner(page_size), chunk_len=chunk_len, lag=0, options=PLAIN_OPTIONS)
    got = drive(_device_runner(page_size), chunk_len=chunk_len, lag=lag, options=PLAIN_OPTIONS)
    check_same(got, want, atol=logprob_tolerance(MODEL))


def test_prompts_of_which_one_token_is_left_run_as_decodes(monkeypatch):
    """Their last chunks, beside decodes and alone: with the tokens, and the logprobs, of any other step."""
    runner, want = _device_runner(4), drive(_cpu_runner(4), chunk_len=1, lag=0, options=PLAIN_OPTIONS)
    forwards: list[bool] = []
    chunks, decodes = runner.forwards.chunks.launch, runner._launch_as_decodes

    def chunks_noted(rows, segments, *others):
        forwards.append(all(len(segment.ids) == 1 and segment.sample is not None for segment in segments))
        return chunks(rows, segments, *others)

    num = iter(range(1000))
    monkeypatch.setattr(runner.forwards.chunks, "launch", chunks_noted)
    monkeypatch.setattr(runner, "_launch_as_decodes", lambda *inputs: (next(num), decodes(*inputs))[1])
    got = drive(runner, chunk_len=1, lag=2, options=PLAIN_OPTIONS)
    check_same(got, want, atol=logprob_tolerance(MODEL))
    assert next(num) > 0 and forwards and not any(forwards)


class _NotingRunner:
    """Notes when steps of a runner are launched, and when their results are asked for."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[tuple[str, int]] = []
        launch, count = runner.launch, iter(range(1000))

        def noting(*inputs: object) -> StepHandle[StepOutput]:
            number = next(count)
            self.notes.append(("launch", number))
            step = launch(*inputs)  # type: ignore[arg-type]
            return StepHandle(step.event, lambda: (self.notes.append(("result", number)), step.result())[1])

        monkeypatch.setattr(runner, "launch", noting)


def test_rows_that_ask_for_logprobs_hold_up_no_launch(monkeypatch):
    """With two steps in flight the third is launched before the first is asked for."""
    runner = _device_runner(4)
    notes = _NotingRunner(runner, monkeypatch).notes
    drive(runner, chunk_len=64, lag=2, num_steps=4, options=[replace(GREEDY, num_top_logprobs=n) for n in (0, 5)])
    first = next(number for kind, number in notes if kind == "result")
    for number in range(first, max(number for _, number in notes) - 1):
        assert notes.index(("launch", number + 2)) < notes.index(("result", number)), number


def test_a_slot_with_all_pages_that_it_may_hold_leaves_its_neighbours_tables_alone():
    """One page more than max_total_len needs may be granted ahead; the last slot's neighbour is the dummy."""
    runner = _device_runner(1, num_slots=2, max_total_len=16)
    executor = StepExecutor(runner, num_slots=2, max_tokens_per_step=64)
    executor.begin_epoch(1)
    most = executor.limits.max_pages_per_slot
    pages = {0: np.arange(most, dtype=np.int32), 1: np.arange(100, 100 + most, dtype=np.int32)}
    admits = tuple(
        Admit(
            slot=slot,
            generation=1,
            request_id="r",
            prompt_ids=as_ints([5, 6]),
            max_total_len=16,
            sampling=PLAIN_OPTIONS[0],
        )
        for slot in pages
    )
    executor.run(
        StepPlan(
            epoch=1,
            step_id=1,
            admits=admits,
            grants=tuple(Grant(slot=slot, pages=of_slot) for slot, of_slot in pages.items()),
            chunks=tuple(Chunk(slot=slot, length=2) for slot in pages),
            decode_set=as_ints([]),
        )
    )
    tables = runner.slots.page_tables  # type: ignore[attr-defined]
    assert tables[0, :most].tolist() == pages[0].tolist() and tables[1, :most].tolist() == pages[1].tolist()
    assert (tables[2] == PAGES).all()


def test_a_forward_of_nothing_is_a_step():
    executor = StepExecutor(_device_runner(4), num_slots=8, max_tokens_per_step=64)
    executor.begin_epoch(1)
    result = executor.run(StepPlan(epoch=1, step_id=1, decode_set=as_ints([])))
    assert len(result.counts) == 0 and result.device_start_ns <= result.device_end_ns


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention_backend": "magic"}, "attention_backend"),
        ({"dtype": "int3"}, "dtype"),
        ({"num_slots": 40_000, "page_size": 2**16}, "num_slots"),
        ({"num_slots": 2**16}, "num_slots"),
        ({"max_tokens_per_step": 2**16}, "max_tokens_per_step"),
    ],
)
def test_settings_that_cannot_be_are_told_by_their_flag(changes, field):
    with pytest.raises(MeshError) as caught:
        _device_runner(**{"page_size": 1} | changes)
    assert caught.value.metadata["field"] == field


def test_attention_that_no_graph_can_hold_names_the_flag_that_goes_with_it():
    from radixmesh.daemons.worker.cuda.attention.choice import choose_attention

    settings = SimpleNamespace(attention_backend="torch", cuda_graphs=True, deterministic=False)
    with pytest.raises(MeshError, match="--no-cuda-graphs") as caught:
        choose_attention(settings, torch.bfloat16, None, torch.device("cuda"))
    assert caught.value.metadata["field"] == "attention_backend"
    settings.cuda_graphs = False
    assert choose_attention(settings, torch.bfloat16, None, torch.device("cuda")).name == "torch"


def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    from radixmesh.daemons.worker.cuda import load

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeshError, match=r"needs an NVIDIA GPU.*--backend cpu") as caught:
        load.load_cuda_runner(MODEL, None)
    assert caught.value.reason_name == "UNSUPPORTED"


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((9, 0), True)])
def test_kernels_begin_early_only_where_the_gpu_can_have_them_wait(monkeypatch, capability, expected):
    from radixmesh.daemons.worker.cuda import load

    seen = []

    def stop(folder, settings, *rest):
        seen.append(settings.use_pdl)
        raise InterruptedError

    # A device that no other test asks about: what it can do is remembered.
    where = torch.device("cuda", capability[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(load, "CudaDevice", lambda index: SimpleNamespace(torch_device=where))
    monkeypatch.setattr(load, "load_on_device", stop)
    settings = replace(
        TINY_SETTINGS,
        dtype="auto",
        attention_backend="auto",
        num_pages=None,
        max_total_len=None,
        cuda_graphs=True,
        use_pdl=True,
    )
    with pytest.raises(InterruptedError):
        load.load_cuda_runner(MODEL, settings)
    assert seen == [expected]


@pytest.mark.parametrize(
    ("page_size", "max_drafts", "lag", "options"),
    [
        (4, 3, 1, [OPTIONS[5], OPTIONS[1]]),
        pytest.param(1, 1, 0, OPTIONS, marks=pytest.mark.full),
        pytest.param(4, 8, 2, OPTIONS, marks=pytest.mark.full),
    ],
)
def test_drafts_change_no_output(monkeypatch, page_size, max_drafts, lag, options):
    """Rows are launched ahead of what the host knows of their lengths; the device accepts what sampling confirms.

    One row is decodes to attention, two are chunks.
    """
    from radixmesh.daemons.worker.cuda.step import verify_steps

    monkeypatch.setattr(verify_steps, "LEAST_CHUNKS", 2)
    num_out = 6 if len(options) < len(OPTIONS) else 14
    steps = {"chunk_len": 64, "num_steps": num_out, "num_out": num_out, "options": options}
    want = drive_long(_cpu_runner(page_size), lag=0, **steps)
    runner = _device_runner(page_size)
    drafter = drafter_of(outputs_of(want, options), seed=max_drafts, share=0.8)
    runner.verify(drafter, max_drafts=max_drafts)  # type: ignore[attr-defined]
    got = drive_long(runner, lag=lag, **steps)
    check_same_outputs(got, want, num_out=num_out, atol=logprob_tolerance(MODEL))
    counts = np.concatenate([result.counts for result in got.results])
    assert counts.max() > 1 and counts.max() <= max_drafts + 1


def test_slots_are_taken_again_while_steps_with_drafts_of_their_former_requests_run():
    options = [OPTIONS[3], GREEDY]

    def drive_twice(runner, lag):
        driver = PlanDriver(runner, lag=lag)
        for prompts in (PROMPTS[2:], PROMPTS[:2]):
            for slot, (prompt, sampling) in enumerate(zip(prompts, options, strict=True)):
                driver.add(slot, prompt, sampling, chunk_len=64, num_out=6)
            driver.run()
        driver.finish(6)
        return driver.tokens

    runner = _device_runner(4)
    outputs: dict[int, list[int]] = {}
    as_before = EachRow(lambda sample, most: outputs.get(len(sample.prompt_ids), [])[len(sample.output_ids) :])
    runner.verify(as_before, max_drafts=3)  # type: ignore[attr-defined]
    want = drive_twice(_cpu_runner(4), 0)
    outputs.update((len(PROMPTS[slot]), tokens) for slot, tokens in want.items())
    assert drive_twice(runner, 2) == want and all(len(tokens) == 6 for tokens in want.values())


def test_attention_that_needs_exact_lengths_verifies_nothing(monkeypatch):
    runner = _device_runner(4)
    monkeypatch.setattr(type(runner.attention), "needs_exact_lengths", True)  # type: ignore[attr-defined]
    runner.verify(EachRow(lambda sample, most: [5] * most), max_drafts=3)  # type: ignore[attr-defined]
    assert runner.max_tokens_per_row == 1
