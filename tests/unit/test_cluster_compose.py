"""Reading compose files: what is understood, and that everything else is refused by name."""

from pathlib import Path

import pytest

from radixmesh.daemons.cluster.compose.compose import DependencyCondition, RestartPolicy
from radixmesh.daemons.cluster.compose.interpolation import interpolate
from radixmesh.daemons.cluster.compose.reader import compose_from_tree, read_compose
from radixmesh.daemons.cluster.errors import ClusterError, ComposeError, UnsupportedKeyError

REPOSITORY = Path(__file__).parents[2]


def read_service(**keys):
    service = {"command": ["radixmesh", "router"]} | keys
    tree = {"services": {"router": service, "worker": {"command": "radixmesh worker"}}}
    variables = {"SET": "value", "EMPTY": ""}
    return compose_from_tree(tree, folder=Path("/project"), variables=variables, default_name="test").services["router"]


@pytest.mark.parametrize("name", ["local.yml", "simulated.yml"])
def test_shipped_files_have_one_of_each_daemon_with_health_checks_and_restarts(name):
    compose = read_compose(REPOSITORY / "compose" / name, {})
    assert list(compose.services) == ["tokenizer", "detokenizer", "worker", "scheduler", "router"]
    for service in compose.services.values():
        assert service.command == ("radixmesh", service.name)
        assert service.restart is RestartPolicy.UNLESS_STOPPED
        assert service.healthcheck is not None and service.healthcheck.hang_window_s == 5.0
        assert all(volume.host_path is not None and volume.host_path.is_dir() for volume in service.volumes)
    waits_for = {dependency.service for dependency in compose.services["router"].depends_on}
    assert waits_for == {"tokenizer", "detokenizer", "scheduler"}
    assert [port.host_port for port in compose.services["router"].ports] == [50050, 8000]


def test_both_forms_of_every_key_mean_the_same():
    assert read_service(command="radixmesh router --flag 'two words'").command == (
        "radixmesh",
        "router",
        "--flag",
        "two words",
    )
    assert read_service(entrypoint=["radixmesh"], command=["router"]).command == ("radixmesh", "router")
    assert read_service(environment=["A=1", "SET", "B=x=y", "UNSET"]).environment == {
        "A": "1",
        "SET": "value",
        "B": "x=y",
    }
    assert read_service(environment={"A": 1, "SET": None, "UNSET": None}).environment == {"A": "1", "SET": "value"}
    short, long = (
        read_service(ports=["8080:50050"]).ports,
        read_service(ports=[{"target": 50050, "published": 8080}]).ports,
    )
    assert short == long and (short[0].container_port, short[0].host_port) == (50050, 8080)
    assert read_service(ports=["127.0.0.1:8080:50050/tcp"]).ports == short
    assert read_service(ports=[50050]).ports[0].host_port is None
    bind = {"type": "bind", "source": "./models", "target": "/models"}
    assert read_service(volumes=["./models:/models:ro"]).volumes == read_service(volumes=[bind]).volumes
    assert read_service(volumes=["./models:/models:ro"]).volumes[0].host_path == Path("/project/models")
    assert read_service(volumes=["cache:/var/cache"]).volumes[0].name == "cache"


def test_dependencies_keep_their_condition():
    (plain,) = read_service(depends_on=["worker"]).depends_on
    assert (plain.service, plain.condition) == ("worker", DependencyCondition.STARTED)
    (explicit,) = read_service(depends_on={"worker": {"condition": "service_started"}}).depends_on
    assert explicit == plain


def test_health_check_times_and_window():
    test = ["CMD", "radixmesh", "health", "127.0.0.1:50050"]
    times = {"interval": "1m30s", "timeout": "500ms", "retries": 4, "start_period": "2h", "start_interval": "1.5s"}
    check = read_service(healthcheck={"test": test, **times}).healthcheck
    assert check is not None
    assert (check.container_port, check.interval_s, check.timeout_s) == (50050, 90.0, 0.5)
    assert (check.retries, check.start_period_s, check.start_interval_s, check.hang_window_s) == (4, 7200.0, 1.5, 360.0)
    as_shell = read_service(healthcheck={"test": "radixmesh health localhost:50050"}).healthcheck
    assert as_shell is not None and as_shell.container_port == 50050
    assert read_service(healthcheck={"disable": True}).healthcheck is None
    assert read_service(healthcheck={"test": ["NONE"]}).healthcheck is None


def test_a_bare_no_which_yaml_reads_as_false_is_a_restart_policy():
    assert read_service(restart=False).restart is RestartPolicy.NO
    assert [policy.restarts(0) for policy in RestartPolicy] == [False, True, False, True]
    assert [policy.restarts(-9) for policy in RestartPolicy] == [False, True, True, True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${SET}/x", "value/x"),
        ("$SET", "value"),
        ("${UNSET:-a:b}", "a:b"),
        ("${EMPTY:-default}", "default"),
        ("${EMPTY-default}", ""),
        ("cost $$5", "cost $5"),
        ("${SET:?why}", "value"),
    ],
)
def test_variables_are_replaced(text, expected):
    assert read_service(environment={"X": text}).environment["X"] == expected


@pytest.mark.parametrize(
    ("keys", "where", "hint"),
    [
        ({"environment": {"X": "${UNSET}"}}, "services.router.environment.X", "UNSET"),
        ({"environment": {"X": "${UNSET:?set the thing}"}}, "services.router.environment.X", "set the thing"),
        ({"environment": {"X": "5$"}}, "services.router.environment.X", "$$"),
        ({"environment": {"X": True}}, "services.router.environment.X", "quotes"),
        ({"command": []}, "services.router", "no command"),
        ({"ports": ["5000-5010:5000-5010"]}, "services.router.ports[0]", "single TCP port"),
        ({"ports": ["50050:50050/udp"]}, "services.router.ports[0]", "TCP"),
        ({"ports": ["70000:50050"]}, "services.router.ports[0]", "65535"),
        ({"volumes": ["/only-one"]}, "services.router.volumes[0]", "source:target"),
        ({"volumes": ["./a:relative"]}, "services.router.volumes[0]", "absolute"),
        ({"restart": "sometimes"}, "services.router.restart", "unless-stopped"),
        ({"depends_on": ["nobody"]}, "services.router.depends_on.nobody", "no such service"),
        (
            {"depends_on": {"worker": {"condition": "service_healthy"}}},
            "services.router.depends_on.worker",
            "healthcheck",
        ),
        (
            {"depends_on": {"worker": {"condition": "soon"}}},
            "services.router.depends_on.worker.condition",
            "service_started",
        ),
        ({"healthcheck": {"test": ["CMD", "curl", "x"]}}, "services.router.healthcheck.test", "radixmesh"),
        ({"healthcheck": {"test": "radixmesh health x:1", "interval": "0s"}}, "services.router.healthcheck", "zero"),
        (
            {"healthcheck": {"test": "radixmesh health x:1", "interval": 5}},
            "services.router.healthcheck.interval",
            "5s",
        ),
        ({"deploy": {"replicas": -1}}, "services.router.deploy.replicas", "outside"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(keys, where, hint):
    with pytest.raises(ComposeError) as caught:
        read_service(**keys)
    assert caught.value.where == where
    assert hint in str(caught.value)


@pytest.mark.parametrize("key", ["network_mode", "env_file", "working_dir", "profiles", "extends", "secrets", "comand"])
def test_keys_that_would_change_what_runs_are_refused(key):
    with pytest.raises(UnsupportedKeyError, match=key):
        read_service(**{key: "x"})


@pytest.mark.parametrize("key", ["image", "build", "container_name", "logging", "x-anything"])
def test_keys_about_the_container_alone_are_ignored(key):
    assert read_service(**{key: {"any": "thing"}}) == read_service()


def test_files_that_cannot_be_read_are_reported_with_their_path(tmp_path):
    with pytest.raises(ClusterError, match=r"missing\.yml"):
        read_compose(tmp_path / "missing.yml", {})
    broken = tmp_path / "broken.yml"
    broken.write_text("services: [")
    with pytest.raises(ComposeError, match=r"broken\.yml is not valid YAML"):
        read_compose(broken, {})
    broken.write_text("services: {a: {command: x, restart: perhaps}}")
    with pytest.raises(ComposeError, match=r"broken\.yml: services\.a\.restart"):
        read_compose(broken, {})
    for text in ("", "[]", "services: {}", "services: 5"):
        broken.write_text(text)
        with pytest.raises(ComposeError):
            read_compose(broken, {})


def test_a_default_may_hold_a_variable() -> None:
    text = "${FOLDER:-./models/${NAME:-tiny}}:/models/${NAME:-tiny}:ro"
    assert interpolate(text, {}) == "./models/tiny:/models/tiny:ro"
    assert interpolate(text, {"NAME": "mine"}) == "./models/mine:/models/mine:ro"
    assert interpolate(text, {"NAME": "mine", "FOLDER": "/data/m"}) == "/data/m:/models/mine:ro"
