"""All that a worker with drafts launches for requests was launched before the first one: nothing compiles late."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.drafting import speculation_of, target_folder
from support.plan_driver import OPTIONS, PROMPTS, PlanDriver, drive
from support.triton_interpreter import DEVICE
from triton.runtime.interpreter import InterpretedFunction

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="launches are noted by Triton's interpreter; a worker on a GPU logs kernel_compiled_late",
)

Launches = set[tuple[object, ...]]


class _Noted:
    """Kernels that are launched, by what they are compiled for: constants, and which pointers are there."""

    is_replaying = False

    def __init__(self) -> None:
        self.found: Launches = set()
        self.outside: list[str] = []
        """Names of those that no graph launched."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        run = InterpretedFunction.run
        noted = self

        def noting(self, *args, grid, warmup, **kwargs):
            kinds = ["none" if arg is None else str(arg.dtype) if isinstance(arg, torch.Tensor) else "" for arg in args]
            constants = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
            noted.found.add((self.fn.__name__, *kinds, *sorted((n, str(value)) for n, value in constants.items())))
            if not noted.is_replaying:
                noted.outside.append(self.fn.__name__)
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

        InterpretedFunction.run = noting
        try:
            yield
        finally:
            InterpretedFunction.run = run


def _runner(topk: int, num_slots: int, noted: _Noted) -> ModelRunner:
    """One that verifies up to 4 drafts, warmed up. Its graphs are launched kernel by kernel."""
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    class Replaying(HostDevice):
        can_capture = True

        def capture(self, work):
            def replay():
                noted.is_replaying = True
                try:
                    return work()
                finally:
                    noted.is_replaying = False

            return replay

    settings = replace(TINY_SETTINGS, page_size=4, num_pages=600, max_total_len=400, cuda_graphs=True)
    settings = replace(settings, num_slots=num_slots, speculation=speculation_of("eagle3", "tiny-llama", 4, topk))
    runner = load_device_runner(target_folder("eagle3", "tiny-llama"), settings, Replaying())
    runner.warm_up(has_decodes=False)
    lengths = DraftLengths(num_slots, 4, catch_up=128)
    runner.verify(runner.network_drafter, max_drafts=4, lengths=lengths)
    return runner


@pytest.mark.parametrize("topk", [1, 3])
def test_no_kernel_is_compiled_for_a_request(topk: int) -> None:
    warmed, served = _Noted(), _Noted()
    with warmed.noting():
        runner = _runner(topk, len(OPTIONS), warmed)
    with served.noting():
        driver = drive(runner, chunk_len=16, lag=1, num_steps=8, options=OPTIONS)
    assert sum(int(result.drafted.sum()) for result in driver.results) > 0
    assert not served.found - warmed.found, sorted(name[0] for name in served.found - warmed.found)


def test_a_step_of_rows_without_filters_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts and without, greedy or not: launches from Python take as long as several kernels of a small model."""
    noted = _Noted()
    runner = _runner(1, 2, noted)
    chosen = itertools.cycle([lambda _: None, lambda _: None, lambda num_rows: RowLengths.even(num_rows, 4)])
    monkeypatch.setattr(DraftLengths, "choose", lambda lengths, slots, is_alone: next(chosen)(len(slots)))
    driver = PlanDriver(runner, lag=1, num_slots=2)
    for slot, sampling in enumerate((Sampling(temperature=0.0), Sampling(temperature=1.0, seed=3))):
        driver.add(slot, PROMPTS[2], sampling, chunk_len=64, num_out=60, min_tokens=0, suppressed=())
    driver.run()
    launch, repeats = runner.launch, []
    monkeypatch.setattr(runner, "launch", lambda rows, *rest: repeats.append(rows.is_repeat) or launch(rows, *rest))
    with noted.noting():
        for _ in range(6):
            driver.run()
    assert noted.found and not noted.outside
    assert all(repeats), "nothing is looked up anew"
