"""Steps of the GPU's runner that draft on the device, on the host: the same tokens as without, several of them each."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.drafting import check_same_outputs, drive_long
from support.plan_driver import GREEDY, OPTIONS, PlanDriver, logprob_tolerance
from support.replaying_device import ReplayingDevice

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths
from radixmesh.daemons.worker.speculation.drafter import EachRow, NoDrafts
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter
from radixmesh.daemons.worker.speculation.step_costs import Size

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="the runner on the host samples under Triton's interpreter; tests/gpu/test_verify_on_gpu.py is for the GPU",
)

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
# One output repeats a token, the other one is a random sequence of two: of its drafts some are right.
REPEATING = [
    Sampling(temperature=0.0, logit_bias=((40, 80.0),)),
    Sampling(temperature=1.0, seed=3, logit_bias=((40, 80.0), (41, 80.0)), num_top_logprobs=2),
]


def _device_runner(page_size: int) -> ModelRunner:
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    return load_device_runner(MODEL, replace(TINY_SETTINGS, page_size=page_size, num_pages=512), HostDevice())


def _cpu_runner(page_size: int) -> ModelRunner:
    return load_cpu_runner(MODEL, page_size=page_size, num_pages=512, threads=1, max_total_len=128)


@pytest.mark.parametrize(
    ("page_size", "max_drafts", "lag", "options"),
    [
        (4, 3, 2, REPEATING),
        pytest.param(1, 1, 0, [*REPEATING, *OPTIONS], marks=pytest.mark.full),
        pytest.param(16, 8, 1, [*REPEATING, *OPTIONS], marks=pytest.mark.full),
    ],
)
def test_drafts_of_the_device_change_no_output(monkeypatch, page_size, max_drafts, lag, options):
    """Every third step drafts nothing, as where drafts do not pay for a while."""
    turn = itertools.count()
    monkeypatch.setattr(
        DraftLengths,
        "choose",
        lambda lengths, slots, is_alone: None if next(turn) % 3 == 2 else RowLengths.even(len(slots), max_drafts),
    )
    num_out = 7 if len(options) == len(REPEATING) else 20
    steps = {"chunk_len": 64, "num_steps": num_out, "num_out": num_out, "options": options}
    want = drive_long(_cpu_runner(page_size), lag=0, **steps)
    runner = _device_runner(page_size)
    runner.verify(NgramDrafter(), max_drafts=max_drafts, lengths=DraftLengths(TINY_SETTINGS.num_slots, max_drafts))  # type: ignore[attr-defined]
    got = drive_long(runner, lag=lag, **steps)
    check_same_outputs(got, want, num_out=num_out, atol=logprob_tolerance(MODEL))
    assert 1 < np.concatenate([result.counts for result in got.results]).max() <= max_drafts + 1
    accepted = sum(int(result.accepted.sum()) for result in got.results)
    assert 0 < accepted < sum(int(result.drafted.sum()) for result in got.results)


@pytest.mark.parametrize(("is_captured", "on_host"), [(False, False), (True, False), (True, True)])
def test_rows_of_a_step_draft_as_many_tokens_as_was_chosen_for_each(monkeypatch, is_captured, on_host):
    """Their positions lie one row's behind the other's, with padding where steps are captured; outputs stay."""
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    max_drafts, rng, chosen = 3, np.random.default_rng(0), []

    def choose(lengths, slots, is_alone):
        by_row = rng.integers(0, max_drafts + 1, len(slots)).astype(np.int32)
        chosen.append((slots, by_row))
        return RowLengths(by_row, Size(1, int(by_row.sum()))) if by_row.any() else None

    monkeypatch.setattr(DraftLengths, "choose", choose)
    steps = {"chunk_len": 64, "num_steps": 9, "num_out": 9, "options": [*REPEATING, *OPTIONS[:2]]}
    want = drive_long(_cpu_runner(4), lag=0, **steps)
    settings = replace(TINY_SETTINGS, page_size=4, num_pages=512)
    if is_captured:
        runner = load_device_runner(MODEL, replace(settings, cuda_graphs=True), ReplayingDevice())
        runner.warm_up(has_decodes=False)
    else:
        runner = _device_runner(4)
    lengths = DraftLengths(TINY_SETTINGS.num_slots, max_drafts)
    drafter = EachRow(lambda sample, most: [40] * most) if on_host else NgramDrafter()
    runner.verify(drafter, max_drafts=max_drafts, lengths=lengths)  # type: ignore[attr-defined]
    told = []
    observe = lengths.observe
    lengths.observe = lambda slots, counts, chosen, times, drafted: (
        told.append((chosen, counts, drafted)) or observe(slots, counts, chosen, times, drafted)
    )
    got = drive_long(runner, lag=2, **steps)
    check_same_outputs(got, want, num_out=9, atol=logprob_tolerance(MODEL))
    drafting = [(of.by_row, counts, drafted) for of, counts, drafted in told if of is not None]
    for by_row, counts, drafted in drafting:
        # Drafts that the host made ahead go to positions of padding as well.
        assert (counts <= drafted + 1).all() and (on_host or (drafted <= by_row).all())
    assert any(len({*drafted[drafted > 0].tolist()}) > 1 for _, _, drafted in drafting)
    assert any((counts > 2).any() for _, counts, _ in drafting)


def test_a_worker_that_drafts_captures_no_decodes_but_those_that_verify():
    """Plain ones would never be replayed, and cost time at the start and memory."""
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    settings = replace(TINY_SETTINGS, num_slots=1, max_tokens_per_step=8, page_size=4, max_total_len=32)
    runner = load_device_runner(MODEL, replace(settings, cuda_graphs=True), ReplayingDevice())
    runner.warm_up(has_decodes=False)
    runner.verify(NgramDrafter(), max_drafts=2)
    assert not runner.forwards.decodes.graphs.num_captured and runner.verifying.graphs.num_captured
    driver = PlanDriver(runner, lag=1)
    driver.add(0, [20, 21, 22], REPEATING[0], chunk_len=8, num_out=9)
    driver.finish(9)
    assert driver.tokens[0] == [40] * 9
    assert sum(int(result.accepted.sum()) for result in driver.results) > 2


def test_a_slot_shows_a_drafter_the_text_of_its_own_request_alone():
    """A slot is taken by a shorter request while steps with drafts of the former one run, then by one that resumes.
    Drafts, half of them wrong, were written behind each text."""
    from radixmesh.daemons.worker.cuda.step.device_drafter import DeviceDrafter

    seen: list[list[int]] = []

    class Reading(DeviceDrafter):
        def propose(self, inputs, state):
            for row, slot in enumerate(inputs.slots.tolist()):
                length, last = int(inputs.lengths[row]), int(inputs.tokens[row])
                if length < 0:
                    length, last = int(state.lengths[slot]), int(state.last_tokens[slot])
                seen.append([*state.tokens_SL[slot, : length - 1].tolist(), last])
                inputs.starts[row], inputs.window_WB[:, row] = length, last

    drafter = NoDrafts()
    drafter.on_device = Reading  # type: ignore[method-assign]
    runner = _device_runner(4)
    runner.verify(drafter, max_drafts=2)  # type: ignore[attr-defined]
    driver = PlanDriver(runner, lag=2)
    random = Sampling(temperature=1.0, seed=3, logit_bias=((40, 80.0), (41, 80.0)))
    requests = ((range(100, 118), random, []), ([20, 21], GREEDY, []), ([30], random, [41, 40, 40]))
    begins, texts = [], []
    for prompt, sampling, output in requests:
        begins.append(len(seen))
        driver.add(0, list(prompt), sampling, chunk_len=7, num_out=12, output=output)
        for _ in range(4):
            driver.run()
        texts.append([*prompt, *driver.tokens[0]])
    driver.finish(2)
    for text, begin, end in zip(texts, begins, [*begins[1:], len(seen)], strict=True):
        assert end >= begin + 4
        for of_step in seen[begin:end]:
            # The last steps' tokens were not told when the slot was taken.
            assert of_step[: len(text)] == text[: len(of_step)]
    assert sum(int(result.accepted.sum()) for result in driver.results) > 2
