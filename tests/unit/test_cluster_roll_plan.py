"""Order of a roll, and how long each process gets to leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixmesh.daemons.cluster.compose.reader import read_compose
from radixmesh.daemons.cluster.errors import UnknownServiceError
from radixmesh.daemons.cluster.plan import ClusterPlan, plan_cluster, plan_endpoints, scale_compose
from radixmesh.daemons.cluster.roll.roll_plan import hurry_s_of, is_tried, plan_roll

COMPOSE = Path(__file__).parents[2] / "compose"


def plan_of(name: str, **scale: int) -> ClusterPlan:
    compose = scale_compose(read_compose([COMPOSE / name], {}), scale)
    ports = {endpoint: 20000 + number for number, endpoint in enumerate(plan_endpoints(compose))}
    return plan_cluster(compose, ports, Path("/volumes"))


def names(plan: ClusterPlan, *services: str) -> list[str]:
    return ["+".join(spec.name for spec in step.specs) for step in plan_roll(plan, services)]


def test_a_worker_of_several_is_replaced_with_its_scheduler() -> None:
    assert names(plan_of("scale.yml")) == [
        *("tokenizer-1", "tokenizer-2", "detokenizer-1", "detokenizer-2"),
        *("scheduler-a-1+worker-a-1", "scheduler-b-1+worker-b-1"),
        *("router-1", "router-2", "front-1"),
    ]
    assert names(plan_of("scale.yml"), "worker-b", "router") == ["scheduler-b-1+worker-b-1", "router-1", "router-2"]
    assert names(plan_of("scale.yml"), "scheduler-b") == ["scheduler-b-1"]


def test_the_only_worker_is_replaced_alone() -> None:
    assert names(plan_of("local.yml")) == ["tokenizer-1", "detokenizer-1", "worker-1", "scheduler-1", "router-1"]


def test_a_service_that_the_file_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownServiceError, match="tokeniser: the file has tokenizer"):
        plan_roll(plan_of("local.yml"), ["tokeniser"])


def test_the_only_one_of_its_kind_leaves_soon_unless_clients_wait_for_it() -> None:
    alone, two = plan_of("local.yml").processes, plan_of("scale.yml").processes
    assert {spec.name for spec in alone if hurry_s_of(spec, alone) is None} == {"router-1"}
    assert all(hurry_s_of(spec, two) is None for spec in two)
    # Of the two one is away.
    assert hurry_s_of(two[0], [spec for spec in two if spec.name != "tokenizer-2"]) is not None


def test_what_needs_memory_or_a_socket_once_more_is_not_tried() -> None:
    assert {spec.service for spec in plan_of("scale.yml").processes if not is_tried(spec)} == {"worker-a", "worker-b"}
    gpu = {spec.service: is_tried(spec) for spec in plan_of("gpu.yml").processes}
    assert not gpu["worker"] and not gpu["scheduler"] and gpu["router"]
