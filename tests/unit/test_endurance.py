"""The load and the judgement of bench/gpu/soak.py: what they are asked to notice, they notice."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("endurance", "hop_ladder")]:
        del sys.modules[name]


def samples(num: int, *, slower: float = 1.0, mb_min: float = 0.0, fds_min: float = 0.0) -> list[object]:
    """Every 3 s: steps of 2 ms + 0.1 ms a row + 0.05 ms a prefill token, in the second half `slower` times that."""
    from endurance.samples import Footprint, Sample, StepCounters

    found, device_s, steps, rows, tokens = [], 0.0, 0.0, 0.0, 0.0
    for number in range(num):
        minutes = number * 3 / 60
        mine = Footprint(pid=7, rss_mb=100 + mb_min * minutes, num_fds=20 + int(fds_min * minutes), num_threads=3)
        found.append(
            Sample(
                at=1000.0 + 3 * number,
                footprints={"worker": mine, "scheduler": mine},
                gpu_mb=None,
                steps=StepCounters(device_s=device_s, steps=steps, rows=rows, prefill_tokens=tokens),
                num_running=0,
                num_waiting=0,
            )
        )
        new_steps, new_rows, new_tokens = 100 + number % 7, 900 + 50 * (number % 11), 3000 + 400 * (number % 5)
        step_s = 0.002 * new_steps + 0.0001 * new_rows + 0.00005 * new_tokens
        device_s += step_s * (slower if number >= num // 2 else 1.0)
        steps, rows, tokens = steps + new_steps, rows + new_rows, tokens + new_tokens
    return found


def test_a_load_has_every_kind_of_request_within_its_bounds() -> None:
    from endurance.load import Ending, LoadMix, RequestMaker

    mix = LoadMix(vocab_size=768, longest_prompt=256, longest_out=64)
    makers = [RequestMaker(mix, number) for number in range(2)]
    jobs = []
    for _ in range(1500):
        job = makers[0].next()
        jobs.append(job)
        makers[0].answered(job.prompt if isinstance(job.prompt, list) else [5], range(job.out_len))
    assert {job.kind for job in jobs} == {"alone", "prefix", "talk", "text", "probe"}
    assert {job.ending for job in jobs} == set(Ending)
    assert {job.num_outputs for job in jobs} == {1, 2}
    assert all(1 <= len(job.prompt) <= 256 for job in jobs if isinstance(job.prompt, list))
    assert all(1 <= job.out_len <= 64 for job in jobs)
    aborted = sum(job.ending is not Ending.LENGTH for job in jobs) / len(jobs)
    assert 0.06 < aborted < 0.14
    others = [makers[1].next() for _ in range(500)]
    probes = {job.probe: job for job in jobs if job.kind == "probe"}
    assert len(probes) == 8
    assert all(probes[job.probe] == job for job in others if job.kind == "probe")
    assert {str(job.prompt) for job in others if job.kind == "alone"}.isdisjoint(str(job.prompt) for job in jobs)


def test_steps_that_become_slower_are_noticed() -> None:
    from endurance.samples import drift_of

    steady, slow = drift_of(samples(100), 1000.0, 30.0), drift_of(samples(100, slower=1.3), 1000.0, 30.0)
    assert steady is not None and slow is not None
    assert steady.us_per == {"step": 2000.0, "row": 100.0, "prefill_token": 50.0}
    assert steady.normalised_ratio == 1.0
    assert all(window.against_model == 1.0 for window in steady.windows)
    assert slow.normalised_ratio == pytest.approx(1.3, abs=0.03)


def test_what_grows_is_noticed() -> None:
    from endurance.faults import Bounds, growth_faults
    from endurance.samples import lives_of

    bounds = Bounds(mb_min=10.0, gpu_mb=256.0, drift=0.1)
    assert growth_faults(lives_of(samples(100)), None, bounds) == []
    assert len(growth_faults(lives_of(samples(100, mb_min=12.0)), None, bounds)) == 2
    assert len(growth_faults(lives_of(samples(100, fds_min=4.0)), None, bounds)) == 2
    assert len(growth_faults([], {"first_steady_mb": 1000.0, "last_mb": 1300.0}, bounds)) == 1


@pytest.mark.parametrize(
    ("counts", "failures", "num_open", "fault"),
    [
        ({"begun": 9, "finished": 7, "aborted": 2}, [], 0, ""),
        ({"begun": 9, "finished": 6, "aborted": 2, "failed": 1}, ["no tokens"], 0, "no tokens"),
        ({"begun": 9, "finished": 6, "aborted": 2}, [], 1, "did not end"),
        ({"begun": 9, "finished": 6, "aborted": 2}, [], 0, "nobody knows"),
        ({"begun": 9, "finished": 9, "resumed": 3}, [], 0, "broke"),
        ({}, ["client process 0 ended with 1"], 0, "ended with 1"),
    ],
)
def test_what_clients_lost_is_noticed(counts: dict[str, int], failures: list[str], num_open: int, fault: str) -> None:
    from endurance.faults import request_faults

    faults = request_faults(Counter(counts), failures, num_open)
    assert bool(faults) == bool(fault)
    assert fault in " ".join(faults)


def test_pages_that_do_not_come_back_are_noticed() -> None:
    from endurance.faults import AtRest

    from radixmesh.scheduler.v1 import scheduler_pb2

    def at_rest(**changes: int) -> AtRest:
        load = {"total_pages": 10, "free_pages": 4, "cached_pages": 6, "num_running": 0, **changes}
        free = 10 if changes.get("num_running", 0) == 0 else 9
        return AtRest(
            state=scheduler_pb2.GetStateResponse(load=scheduler_pb2.Load(**load)),
            flushed=scheduler_pb2.GetStateResponse(load=scheduler_pb2.Load(total_pages=10, free_pages=free)),
            journal_requests=changes.get("num_waiting", 0),
            journal_bytes=0,
            detokenizer_entries=0,
        )

    assert at_rest().faults() == []
    assert len(at_rest(free_pages=3).faults()) == 1
    assert len(at_rest(num_running=1).faults()) == 2
    assert len(at_rest(num_waiting=1).faults()) == 2
