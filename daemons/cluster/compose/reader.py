"""Reads a compose file. What local processes cannot honour is refused; what makes no difference to them is ignored."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from radixmesh.daemons.cluster.compose.compose import (
    ComposeFile,
    Dependency,
    DependencyCondition,
    HealthCheck,
    PublishedPort,
    RestartPolicy,
    Service,
    Volume,
)
from radixmesh.daemons.cluster.compose.containers_only import without_containers_only
from radixmesh.daemons.cluster.compose.interpolation import interpolate
from radixmesh.daemons.cluster.compose.merge import merge_trees
from radixmesh.daemons.cluster.compose.node import ComposeNode
from radixmesh.daemons.cluster.errors import ClusterError, ComposeError, UnsupportedKeyError

_T = TypeVar("_T")

_FILE_KEYS = frozenset({"name", "services"})
_FILE_KEYS_WITHOUT_EFFECT = frozenset({"version", "volumes", "networks"})
_SERVICE_KEYS = frozenset(
    [
        "command",
        "depends_on",
        "deploy",
        "entrypoint",
        "environment",
        "expose",
        "healthcheck",
        "ports",
        "restart",
        "stop_grace_period",
        "volumes",
    ]
)
# These shape the container around the process, or how its image is made; a local process runs the same without them.
_SERVICE_KEYS_WITHOUT_EFFECT = frozenset(
    [
        "image",
        "build",
        "pull_policy",
        "platform",
        "container_name",
        "hostname",
        "labels",
        "annotations",
        "logging",
        "networks",
        "init",
        "ipc",
        "cap_add",
        "cap_drop",
        "security_opt",
        "shm_size",
        "ulimits",
        "mem_limit",
        "memswap_limit",
        "mem_reservation",
        "cpus",
        "cpu_shares",
        "read_only",
        "tmpfs",
        "user",
        "stdin_open",
        "tty",
        "sysctls",
        "oom_score_adj",
    ]
)
_DURATION_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:us|ms|s|m|h))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_MAX_REPLICAS = 256
# Times of a health check that hold for local processes only.
_LOCAL_TIMES = "x-local"
_TIMES = frozenset(["interval", "timeout", "retries", "start_period", "start_interval"])


def read_compose(paths: Path | Sequence[Path], variables: Mapping[str, str]) -> ComposeFile:
    """Reads a compose file, or several, later ones over earlier ones; `variables` (the environment) are its `${...}`.

    Raises ClusterError where a file cannot be read and ComposeError, naming the place, where it says something that
    local processes cannot follow. Relative paths start at the folder of the first file, as they do for Docker.
    """
    paths = [paths] if isinstance(paths, Path) else list(paths)
    tree = merge_trees([_parse(path) for path in paths])
    try:
        return compose_from_tree(
            tree, folder=paths[0].parent.absolute(), variables=variables, default_name=paths[0].stem
        )
    except ComposeError as error:
        raise type(error)(f"{', '.join(map(str, paths))}: {error.where}", error.problem) from None


def _parse(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"{path} cannot be read ({error}); name a compose file, for instance compose/local.yml"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ComposeError("", f"{path} is not valid YAML: {error}") from error


def compose_from_tree(tree: object, *, folder: Path, variables: Mapping[str, str], default_name: str) -> ComposeFile:
    """Turns a parsed YAML tree into a ComposeFile; relative host paths start at `folder`."""
    root = ComposeNode(interpolate(tree, variables))
    keys = {key: node for key, node in root.items() if not key.startswith("x-")}
    _refuse_unknown(keys, supported=_FILE_KEYS, ignored=_FILE_KEYS_WITHOUT_EFFECT)
    if "services" not in keys or not keys["services"].mapping():
        raise ComposeError("services", "the file has no services")
    nodes, containers_only, left_out = without_containers_only(dict(keys["services"].items()))
    services = {name: _read_service(name, node, folder, variables) for name, node in nodes.items()}
    for service in services.values():
        _check_dependencies(service, services)
    project = keys["name"].text() if "name" in keys else default_name
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", project):
        raise ComposeError("name", f"{project!r} must be lower-case letters, digits, '.', '-' and '_'")
    return ComposeFile(project=project, services=services, containers_only=containers_only, left_out=left_out)


def parse_duration_s(node: ComposeNode) -> float:
    """Reads a compose duration (`500ms`, `1m30s`) in seconds."""
    text = node.text()
    if not _DURATION.fullmatch(text):
        raise node.fail(f"{text!r} is no duration; write for instance 500ms, 5s or 1m30s")
    return sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in _DURATION_PART.findall(text))


def _refuse_unknown(keys: Mapping[str, ComposeNode], *, supported: frozenset[str], ignored: frozenset[str]) -> None:
    for key, node in keys.items():
        if key not in supported and key not in ignored:
            known = ", ".join(sorted(supported))
            raise UnsupportedKeyError(node.where, f"local processes do not honour this key; they know: {known}")


def _read_service(name: str, node: ComposeNode, folder: Path, variables: Mapping[str, str]) -> Service:
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*", name):
        raise node.fail("a service name is letters, digits, '.', '-' and '_'")
    keys = {key: child for key, child in node.items() if not key.startswith("x-")}
    _refuse_unknown(keys, supported=_SERVICE_KEYS, ignored=_SERVICE_KEYS_WITHOUT_EFFECT)
    command = _read_command(keys.get("entrypoint")) + _read_command(keys.get("command"))
    if not command:
        raise node.fail("the service has no command; the one inside an image is unknown to local processes")
    return Service(
        name=name,
        command=command,
        environment=_read_or(keys, "environment", lambda child: _read_environment(child, variables), {}),
        depends_on=_read_or(keys, "depends_on", _read_dependencies, ()),
        healthcheck=_read_or(keys, "healthcheck", _read_healthcheck, None),
        restart=_read_or(keys, "restart", _read_restart, RestartPolicy.NO),
        ports=_read_or(keys, "ports", lambda child: tuple(_read_port(port) for port in child.sequence()), ()),
        expose=_read_or(keys, "expose", lambda child: tuple(_read_port_number(port) for port in child.sequence()), ()),
        volumes=_read_or(
            keys, "volumes", lambda child: tuple(_read_volume(volume, folder) for volume in child.sequence()), ()
        ),
        replicas=_read_or(keys, "deploy", _read_replicas, 1),
        stop_grace_s=_read_or(keys, "stop_grace_period", parse_duration_s, 10.0),
    )


def _read_or(keys: Mapping[str, ComposeNode], key: str, reader: Callable[[ComposeNode], _T], default: _T) -> _T:
    return reader(keys[key]) if key in keys and not keys[key].is_null else default


def _read_command(node: ComposeNode | None) -> tuple[str, ...]:
    if node is None or node.is_null:
        return ()
    if node.is_sequence:
        return tuple(part.text() for part in node.sequence())
    return tuple(shlex.split(node.text()))


def _read_environment(node: ComposeNode, variables: Mapping[str, str]) -> dict[str, str]:
    """Reads `NAME: value` or `- NAME=value`; a name without a value is taken from `variables`, as Docker does."""
    entries: list[tuple[str, ComposeNode]] = []
    if node.is_sequence:
        for entry in node.sequence():
            name, equals, value = entry.text().partition("=")
            entries.append((name, ComposeNode(value if equals else None, entry.where)))
    else:
        entries.extend(node.items())
    environment: dict[str, str] = {}
    for name, child in entries:
        if not child.is_null:
            environment[name] = child.text()
        elif name in variables:
            environment[name] = variables[name]
    return environment


def _read_dependencies(node: ComposeNode) -> tuple[Dependency, ...]:
    if node.is_sequence:
        names = [child.text() for child in node.sequence()]
        return tuple(Dependency(service=name, condition=DependencyCondition.STARTED) for name in names)
    dependencies = []
    for name, child in node.items():
        keys = child.mapping()
        # `restart` (restart along with the dependency) is refused: our daemons reconnect by themselves.
        _refuse_unknown(keys, supported=frozenset({"condition"}), ignored=frozenset({"required"}))
        condition = keys["condition"] if "condition" in keys else ComposeNode("service_started")
        try:
            dependencies.append(Dependency(service=name, condition=DependencyCondition(condition.text())))
        except ValueError:
            raise condition.fail("the condition is service_started or service_healthy") from None
    return tuple(dependencies)


def _check_dependencies(service: Service, services: Mapping[str, Service]) -> None:
    for dependency in service.depends_on:
        where = f"services.{service.name}.depends_on.{dependency.service}"
        if dependency.service not in services:
            raise ComposeError(where, f"there is no such service; the file has {', '.join(services)}")
        if dependency.condition is DependencyCondition.HEALTHY and services[dependency.service].healthcheck is None:
            raise ComposeError(where, f"service_healthy needs a healthcheck on {dependency.service}")


def _read_healthcheck(node: ComposeNode) -> HealthCheck | None:
    keys = node.mapping()
    supported = frozenset(["test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"])
    _refuse_unknown(keys, supported=supported | {_LOCAL_TIMES}, ignored=frozenset())
    if _LOCAL_TIMES in keys:
        # In a container each check starts a process; here it is a call on an open connection and may be frequent.
        local = keys[_LOCAL_TIMES].mapping()
        _refuse_unknown(local, supported=_TIMES, ignored=frozenset())
        keys = {**keys, **local}
    if "disable" in keys and keys["disable"].value is True:
        return None
    if "test" not in keys:
        raise node.fail("the check has no test")
    test = keys["test"]
    words = [word.text() for word in test.sequence()] if test.is_sequence else ["CMD-SHELL", test.text()]
    if words[:1] == ["NONE"]:
        return None
    if words[:1] == ["CMD-SHELL"]:
        words = ["CMD", *shlex.split(" ".join(words[1:]))]
    # Flags of the verb make no difference here: the supervisor asks itself.
    match = re.fullmatch(r"[\w.-]+:(\d{1,5})", words[3]) if len(words) >= 4 else None
    if words[:3] != ["CMD", "radixmesh", "health"] or match is None:
        raise test.fail('local processes are asked over gRPC: write ["CMD", "radixmesh", "health", "127.0.0.1:<port>"]')
    default = HealthCheck(container_port=int(match[1]))

    def seconds(key: str, fallback: float) -> float:
        return parse_duration_s(keys[key]) if key in keys else fallback

    check = HealthCheck(
        container_port=default.container_port,
        interval_s=seconds("interval", default.interval_s),
        timeout_s=seconds("timeout", default.timeout_s),
        retries=keys["retries"].integer(low=1, high=1000) if "retries" in keys else default.retries,
        start_period_s=seconds("start_period", default.start_period_s),
        start_interval_s=seconds("start_interval", default.start_interval_s),
    )
    if min(check.interval_s, check.timeout_s, check.start_interval_s) <= 0:
        raise node.fail("interval, timeout and start_interval must be longer than zero")
    return check


def _read_restart(node: ComposeNode) -> RestartPolicy:
    # YAML reads a bare `no` as false.
    text = "no" if node.value is False else node.text()
    try:
        return RestartPolicy(text)
    except ValueError:
        raise node.fail("the policy is no, always, on-failure or unless-stopped") from None


def _read_port_number(node: ComposeNode) -> int:
    return node.integer(low=1, high=65535)


def _read_port(node: ComposeNode) -> PublishedPort:
    """Reads `"50050:50051"`, `"127.0.0.1:50050:50051"`, `"50051"`, or the mapping with `target` and `published`."""
    if node.is_mapping:
        keys = node.mapping()
        _refuse_unknown(
            keys, supported=frozenset({"target", "published"}), ignored=frozenset({"mode", "name", "host_ip"})
        )
        if "target" not in keys:
            raise node.fail("the port has no target")
        host = _read_port_number(keys["published"]) if "published" in keys else None
        return PublishedPort(container_port=_read_port_number(keys["target"]), host_port=host)
    match = re.fullmatch(r"(?:(?:[\d.]+:)?(?P<host>\d{1,5}):)?(?P<container>\d{1,5})(?:/tcp)?", node.text())
    if match is None:
        raise node.fail(f"{node.value!r} is no single TCP port; write for instance 50050:50051")
    container = _read_port_number(ComposeNode(match["container"], node.where))
    host = _read_port_number(ComposeNode(match["host"], node.where)) if match["host"] else None
    return PublishedPort(container_port=container, host_port=host)


def _read_volume(node: ComposeNode, folder: Path) -> Volume:
    """Reads `source:target[:mode]` or the mapping with `type`, `source` and `target`."""
    if node.is_mapping:
        keys = node.mapping()
        _refuse_unknown(
            keys, supported=frozenset({"type", "source", "target"}), ignored=frozenset({"read_only", "bind"})
        )
        if not {"source", "target"} <= keys.keys():
            raise node.fail("the volume needs a source and a target")
        source, target = keys["source"].text(), keys["target"].text()
    else:
        parts = node.text().split(":")
        if len(parts) not in (2, 3):
            raise node.fail(f"{node.value!r} is no source:target[:ro]")
        source, target = parts[0], parts[1]
    if not target.startswith("/") or target.rstrip("/") == "":
        raise node.fail(f"the target {target!r} must be an absolute path inside the container")
    target = target.rstrip("/")
    if not source.startswith((".", "/", "~")):
        return Volume(container_path=target, host_path=None, name=source)
    host_path = Path(source).expanduser()
    return Volume(container_path=target, host_path=(folder / host_path).resolve(), name=None)


def _read_replicas(node: ComposeNode) -> int:
    keys = node.mapping()
    _refuse_unknown(keys, supported=frozenset({"replicas"}), ignored=frozenset({"resources", "labels"}))
    return keys["replicas"].integer(low=0, high=_MAX_REPLICAS) if "replicas" in keys else 1
