"""From compose file to processes: addresses, paths, scale, order."""

import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.cluster import ports as ports_module
from radixmesh.daemons.cluster.compose.compose import Dependency, DependencyCondition, Service
from radixmesh.daemons.cluster.compose.reader import compose_from_tree
from radixmesh.daemons.cluster.endpoint import Endpoint
from radixmesh.daemons.cluster.errors import (
    ClusterError,
    ComposeError,
    DependencyCycleError,
    PortTakenError,
    UnknownServiceError,
)
from radixmesh.daemons.cluster.plan import plan_cluster, plan_endpoints, scale_compose, unpublish
from radixmesh.daemons.cluster.ports import PortClaims
from radixmesh.daemons.cluster.start_order import start_levels

HEALTH = {"test": ["CMD", "radixmesh", "health", "127.0.0.1:50051"]}


def make_compose(router=None, worker=None):
    base = {
        "command": ["radixmesh", "worker"],
        "environment": {"RADIXMESH_LISTEN": "0.0.0.0:50051"},
        "healthcheck": HEALTH,
    }
    front = {
        "command": ["radixmesh", "router"],
        "environment": {"RADIXMESH_LISTEN": "0.0.0.0:50050", "RADIXMESH_WORKERS": "worker:50051"},
        "depends_on": {"worker": {"condition": "service_healthy"}},
        "ports": ["50050:50050"],
    }
    tree = {"services": {"router": front | (router or {}), "worker": base | (worker or {})}}
    return compose_from_tree(tree, folder=Path("/project"), variables={}, default_name="test")


def plan(compose):
    """Plans with ports 1000, 1001, ... in the order of the endpoints; published ones as they are."""
    ports = {endpoint: port or 1000 + index for index, (endpoint, port) in enumerate(plan_endpoints(compose).items())}
    return {spec.name: spec for spec in plan_cluster(compose, ports, Path("/run/volumes")).processes}


def test_a_service_name_becomes_the_addresses_of_all_its_replicas():
    specs = plan(scale_compose(make_compose(), {"worker": 3}))
    assert list(specs) == ["router-1", "worker-1", "worker-2", "worker-3"]
    workers = [specs[f"worker-{index}"].address for index in (1, 2, 3)]
    assert len(set(workers)) == 3
    assert specs["router-1"].environment["RADIXMESH_WORKERS"] == ",".join(workers)
    for index, address in enumerate(workers, start=1):
        assert specs[f"worker-{index}"].environment["RADIXMESH_LISTEN"] == address


def test_only_the_first_replica_keeps_the_published_port():
    specs = plan(scale_compose(make_compose(), {"router": 2}))
    assert specs["router-1"].address == "127.0.0.1:50050"
    assert specs["router-2"].address != "127.0.0.1:50050"
    assert set(plan_endpoints(unpublish(make_compose())).values()) == {None}


def test_commands_run_with_this_interpreter_and_their_arguments_are_translated():
    command = ["radixmesh", "router", "--workers=worker:50051", "--model", "/models/tiny/x.json", "--other", "/models2"]
    specs = plan(make_compose(router={"command": command, "volumes": ["./m:/models/tiny", "/big:/models"]}))
    assert specs["router-1"].argv == (
        *(sys.executable, "-m", "radixmesh.cli", "router"),
        f"--workers={specs['worker-1'].address}",
        *("--model", "/project/m/x.json", "--other", "/models2"),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/models/tiny", "/project/m"),
        ("a=/models/tiny,b=/models/tiny/y", "a=/project/m,b=/project/m/y"),
        ("/models/tinyer", "/models/tinyer"),
        ("/else/models/tiny", "/else/models/tiny"),
        ("named:/cache/z", "named:/run/volumes/store/z"),
        ("localhost:50050", "127.0.0.1:50050"),
        ("localhost:1234", "localhost:1234"),
        ("myworker:50051", "myworker:50051"),
        ("worker:50051/path", "{worker}/path"),
        ("http://worker:50051", "http://{worker}"),
        ("a,worker:50051", "a,{worker}"),
        ("10.0.0.0:50050", "10.0.0.0:50050"),
        ("[::]:50050", "127.0.0.1:50050"),
    ],
)
def test_translation_of_values(value, expected):
    environment = {"RADIXMESH_LISTEN": "0.0.0.0:50050", "X": value}
    specs = plan(make_compose(router={"environment": environment, "volumes": ["./m:/models/tiny", "store:/cache"]}))
    assert specs["router-1"].environment["X"] == expected.format(worker=specs["worker-1"].address)


def test_addresses_that_cannot_be_are_refused():
    def with_value(value):
        return make_compose(router={"environment": {"RADIXMESH_LISTEN": "0.0.0.0:50050", "X": value}})

    with pytest.raises(ComposeError, match=r"environment\.X.*worker listens on 50051"):
        plan(with_value("worker:5051"))
    with pytest.raises(ComposeError, match="no replica"):
        plan(scale_compose(with_value("worker:50051"), {"worker": 0}))
    with pytest.raises(ComposeError, match="2 replicas"):
        plan(scale_compose(with_value("http://worker:50051"), {"worker": 2}))
    with pytest.raises(ComposeError, match="RADIXMESH_LISTEN"):
        plan(make_compose(worker={"environment": {}}))
    with pytest.raises(ComposeError, match="published by"):
        plan(make_compose(worker={"ports": ["50050:50051"]}))


def test_scale_is_checked():
    with pytest.raises(UnknownServiceError, match="router, worker"):
        scale_compose(make_compose(), {"wroker": 2})
    with pytest.raises(ClusterError, match="256"):
        scale_compose(make_compose(), {"worker": 257})


def test_ports_are_distinct_free_and_outside_the_ephemeral_range():
    endpoints = plan_endpoints(unpublish(scale_compose(make_compose(), {"worker": 100})))
    ports = PortClaims().assign(endpoints)
    assert ports.keys() == endpoints.keys()
    assert len(set(ports.values())) == 101
    assert all(20000 <= port <= 32000 for port in ports.values())


def test_a_taken_published_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port}, published by router"):
            PortClaims().assign(plan_endpoints(make_compose(router={"ports": [f"{port}:50050"]})))


@pytest.mark.skipif(sys.platform != "linux", reason="claims are of Linux")
def test_ports_of_a_cluster_are_no_others_while_it_runs(monkeypatch):
    """Though nobody listens there now: a daemon of it may be about to start again."""
    # No other test has daemons there.
    monkeypatch.setattr(ports_module, "_FIRST_PORT", 32001)
    monkeypatch.setattr(ports_module, "_LAST_PORT", 32008)
    first, second = PortClaims(), PortClaims()
    endpoints = [Endpoint("worker", replica, 50051) for replica in range(1, 9)]
    ports = first.assign(dict.fromkeys(endpoints[:4]))
    others = second.assign(dict.fromkeys(endpoints[4:]))
    assert len({*ports.values(), *others.values()}) == 8
    published = {endpoints[0]: ports[endpoints[0]]}
    with pytest.raises(PortTakenError, match=f"port {ports[endpoints[0]]}, published by worker"):
        second.assign(published)
    first.release()
    assert second.assign(published) == published
    second.release()


def make_services(waits_for):
    started = DependencyCondition.STARTED
    return {
        name: Service(
            name=name,
            command=("x",),
            environment={},
            depends_on=tuple(Dependency(service=other, condition=started) for other in sorted(others)),
        )
        for name, others in waits_for.items()
    }


@given(st.data())
def test_every_service_starts_after_those_it_waits_for(data):
    names = data.draw(st.permutations([f"s{index}" for index in range(data.draw(st.integers(1, 8)))]))
    waits_for = {
        name: data.draw(st.sets(st.sampled_from(names[:index]))) if index else set() for index, name in enumerate(names)
    }
    shuffled = {name: waits_for[name] for name in data.draw(st.permutations(names))}
    levels = start_levels(make_services(shuffled))
    level_of = {name: index for index, level in enumerate(levels) for name in level}
    assert sorted(level_of) == sorted(names)
    for name, others in waits_for.items():
        # As early as possible, and never before a dependency.
        assert level_of[name] == max((level_of[other] + 1 for other in others), default=0)


def test_a_circle_is_named():
    with pytest.raises(DependencyCycleError, match=r"a -> c -> b -> a|b -> a -> c -> b|c -> b -> a -> c"):
        start_levels(make_services({"a": {"c"}, "b": {"a"}, "c": {"b"}, "d": {"a"}, "e": set()}))
