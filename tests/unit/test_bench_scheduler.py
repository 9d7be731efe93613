"""`radixmesh bench scheduler`: what it prints, that it is repeatable, and that its figures mean what they say."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import numpy as np
import pytest

from radixmesh.cli.bench import run
from radixmesh.cli.bench.replay.replay import Replay
from radixmesh.cli.bench.replay.replay_config import ReplayConfig
from radixmesh.cli.bench.replay.step_costs import PARTS, StepCosts
from radixmesh.cli.bench.replay.step_socket import StepSocket

SMALL = ReplayConfig(workload="tree", num_requests=22, running=16)


@functools.cache
def _small() -> dict[str, object]:
    return Replay(SMALL).run()


def test_prints_one_object_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    words = "scheduler --workload few-shot --requests 24 --running 8 --tree-tokens 3000 --policy lpm --seed 3 --json"
    assert run(words.split()) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    for name in ("step_ms", "ttft_ms", "itl_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"], name
    assert set(report["step_parts_us"]) == set(PARTS)
    assert all(part["mean"] > 0 for part in report["step_parts_us"].values())
    assert report["num_finished"] == report["num_requests"] == 24
    assert report["out_tok_s"] == pytest.approx(report["output_tokens"] / report["makespan_s"], rel=1e-3)
    assert report["config"]["seed"] == 3 and report["config"]["policy"] == "lpm"
    assert report["num_steps"] > 0 and report["invariant_violations"] == 0


def test_all_but_the_costs_is_a_function_of_the_arguments() -> None:
    first, second = _virtual(_small()), _virtual(Replay(SMALL).run())
    assert first == second
    assert first != _virtual(Replay(replace(SMALL, seed=99)).run())


_NUM_REQUESTS = {"few-shot": 48, "multi-turn": 8, "tree": 24, "code": 36}
# Every workload and every policy once; every pair is in the full suite.
_DAILY = [("few-shot", "fcfs"), ("multi-turn", "lpm"), ("tree", "dfs-weight"), ("code", "fcfs")]


@pytest.mark.parametrize(
    ("workload", "num_requests", "policy"),
    [
        pytest.param(workload, num, policy, marks=() if (workload, policy) in _DAILY else pytest.mark.full)
        for workload, num in _NUM_REQUESTS.items()
        for policy in ("fcfs", "lpm", "dfs-weight")
    ],
)
def test_with_room_the_hit_rate_is_nearly_the_oracles(workload: str, num_requests: int, policy: str) -> None:
    report = Replay(ReplayConfig(workload=workload, num_requests=num_requests, running=32, policy=policy)).run()
    assert _number(report["hit_rate"]) >= 0.98 * _number(report["oracle_hit_rate"]) > 0.3
    assert report["evicted_tokens"] == 0


def test_without_a_cache_there_are_no_hits_and_more_work() -> None:
    cached, plain = _small(), Replay(replace(SMALL, cache="none")).run()
    assert plain["hit_rate"] == 0.0 < _number(cached["hit_rate"])
    assert _number(plain["prefilled_tokens"]) > 3 * _number(cached["prefilled_tokens"])
    assert plain["output_tokens"] == cached["output_tokens"]


def test_too_little_memory_evicts_and_retracts_but_finishes() -> None:
    report = Replay(
        replace(SMALL, num_requests=44, cache_tokens=4000, speed=50.0, planner=(("decode_reserve_tokens", "1"),))
    ).run()
    assert report["num_finished"] == report["num_requests"]
    assert _number(report["evicted_tokens"]) > 0 and _number(report["retractions"]) > 0
    assert _number(report["hit_rate"]) < _number(report["oracle_hit_rate"])


def test_depth_zero_waits_for_every_round_trip() -> None:
    config = ReplayConfig(workload="single-stream", running=1)
    waiting, ahead = Replay(replace(config, depth=0)).run(), Replay(config).run()
    # A step of one row takes 2.01 ms, a round trip 2 ms more.
    assert _itl(waiting) == pytest.approx(4.0, abs=0.1)
    assert _itl(ahead) == pytest.approx(2.0, abs=0.1)


def test_tree_is_there_before_the_workload_starts() -> None:
    report = Replay(replace(SMALL, num_requests=44, tree_tokens=6000, cache_tokens=12_000)).run()
    assert _number(report["evicted_tokens"]) > 0, "6,000 tokens of tree and the workload do not fit 12,000"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workload tree --cache-tokens 300", "turn 0 cannot run"),
        ("--workload tree --running 0", "--running must be >= 1"),
        ("--workload tree --pipeline-depth deep", "--pipeline-depth must be auto or a number"),
        ("--workload tree --depth deep", "--pipeline-depth must be auto or a number"),
        ("--workload tree --policy nonsense", "choose one of fcfs"),
        ("--workload tree --planner nonsense=1", "the planner has"),
        ("--workload tree --planner chunk_tokens", "NAME=VALUE"),
    ],
)
def test_bad_settings_say_what_to_do(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scheduler", *words.split(), "--requests", "22"]) == 2
    assert message in capsys.readouterr().err


def test_socket_carries_messages_larger_than_the_kernel_takes_at_once() -> None:
    messages = [b"", b"x", np.random.default_rng(0).bytes(20_000_000), b"last"]
    with StepSocket() as link:
        for message in messages:
            link.write(message)
            assert link.read() == message


def test_costs_belong_to_the_step_that_is_charged() -> None:
    costs = StepCosts()
    for step, running in ((1, 4), (2, 8)):
        with costs.part("plan"):
            sum(range(20_000))
        costs.charge(step, running)
    with costs.part("process"):
        sum(range(20_000))
    costs.charge(2)
    every, full = costs.report(), costs.report(at_least=8)
    assert every["num_steps"] == 2 and full["num_steps"] == 1
    parts = full["parts_us"]
    assert isinstance(parts, dict) and parts["plan"]["p50"] > 0 < parts["process"]["p50"]


def _virtual(report: dict[str, object]) -> dict[str, object]:
    real = ("step_ms", "step_parts_us", "full_steps")
    return {name: value for name, value in report.items() if name not in real}


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _itl(report: dict[str, object]) -> float:
    gaps = report["itl_ms"]
    assert isinstance(gaps, dict)
    return float(gaps["p50"])
