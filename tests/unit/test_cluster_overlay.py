"""Several compose files as one, and what local processes leave to containers."""

from pathlib import Path

import pytest

from radixmesh.daemons.cluster.compose.merge import merge_trees
from radixmesh.daemons.cluster.compose.reader import compose_from_tree, read_compose
from radixmesh.daemons.cluster.errors import ComposeError

COMPOSE = Path(__file__).parents[2] / "compose"
TOPOLOGIES = sorted(path.name for path in COMPOSE.glob("*.yml") if not path.name.startswith("observe"))


def merged_service(base, over):
    return merge_trees([{"services": {"a": base}}, {"services": {"a": over}}])["services"]["a"]


def test_later_files_win_key_by_key():
    base = {"image": "x", "deploy": {"replicas": 2, "resources": {"limits": {"cpus": "1"}}}, "restart": "always"}
    over = {"image": "y", "deploy": {"resources": {"limits": {"memory": "1G"}}}, "restart": None}
    assert merged_service(base, over) == {
        "image": "y",
        "deploy": {"replicas": 2, "resources": {"limits": {"cpus": "1", "memory": "1G"}}},
        "restart": "always",
    }
    three = merge_trees([{"name": "a", "services": {"s": {}}}, {"services": {"t": {}}}, {"name": "c"}])
    assert three == {"name": "c", "services": {"s": {}, "t": {}}}


@pytest.mark.parametrize(
    ("key", "base", "over", "expected"),
    [
        ("command", ["x", "--a"], ["y"], ["y"]),
        ("entrypoint", ["x"], "y", "y"),
        ("healthcheck", {"test": ["x"], "retries": 3}, {"test": ["y"]}, {"test": ["y"], "retries": 3}),
        ("environment", ["A=1", "B=x=y", "C"], {"A": 2}, {"A": 2, "B": "x=y", "C": None}),
        ("environment", {"A": 1}, ["A=2"], {"A": "2"}),
        ("depends_on", ["a"], {"b": {"condition": "service_healthy"}}, {
            "a": {"condition": "service_started"}, "b": {"condition": "service_healthy"}
        }),
        ("volumes", ["./one:/m:ro", "data:/d"], ["./two:/m"], ["data:/d", "./two:/m"]),
        ("volumes", [{"source": "x", "target": "/m"}], ["./two:/m"], ["./two:/m"]),
        ("ports", ["1:1"], ["1:1", "2:2"], ["1:1", "2:2"]),
    ],
)  # fmt: skip
def test_each_kind_of_key_is_merged_as_docker_does(key, base, over, expected):
    assert merged_service({key: base}, {key: over})[key] == expected


def test_a_service_for_containers_only_goes_with_all_that_names_it():
    daemon = {"command": ["radixmesh", "router"]}
    tree = {
        "services": {
            "router": daemon
            | {"environment": {"A": "http://store:4317", "B": "keystore:1", "C": "store"}, "depends_on": ["store"]},
            "worker": daemon | {"environment": ["A=tcp://store:1,x", "B=2"], "depends_on": {"store": {}, "router": {}}},
            "store": {"image": "x", "network_mode": "whatever", "x-local": "skip"},
        }
    }  # fmt: skip
    compose = compose_from_tree(tree, folder=Path("/"), variables={}, default_name="t")
    assert compose.containers_only == ("store",)
    assert compose.left_out == ("router.environment.A", "worker.environment.A")
    assert compose.services["router"].environment == {"B": "keystore:1", "C": "store"}
    assert compose.services["worker"].environment == {"B": "2"}
    assert [dependency.service for dependency in compose.services["router"].depends_on] == []
    assert [dependency.service for dependency in compose.services["worker"].depends_on] == ["router"]
    tree["services"]["store"]["x-local"] = "maybe"
    with pytest.raises(ComposeError, match=r"services\.store\.x-local"):
        compose_from_tree(tree, folder=Path("/"), variables={}, default_name="t")


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_observing_overlay_fits_every_topology_and_changes_nothing_for_local_processes(name):
    alone = read_compose(COMPOSE / name, {})
    overlays = {"worker-rank-1": "observe-ranks.yml", "worker-prefill": "observe-pd.yml"}
    own = COMPOSE / next((file for service, file in overlays.items() if service in alone.services), f"observe-{name}")
    overlay = own if own.exists() else COMPOSE / "observe.yml"
    observed = read_compose([COMPOSE / name, overlay], {})
    assert observed.containers_only == ("prometheus", "grafana", "otel-collector", "jaeger")
    daemons = [name for name, service in alone.services.items() if "RADIXMESH_METRICS_LISTEN" in service.environment]
    assert set(observed.left_out) == {f"{name}.environment.RADIXMESH_OTLP_ENDPOINT" for name in daemons}
    assert observed.services == alone.services and observed.project == alone.project


def test_the_overlay_alone_is_refused_with_a_reason():
    with pytest.raises(ComposeError, match="no command"):
        read_compose(COMPOSE / "observe.yml", {})
