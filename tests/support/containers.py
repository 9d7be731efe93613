"""A compose project in a Docker engine, as the tests handle it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.engine import Engine

COMPOSE = Path(__file__).parents[2] / "compose"


@dataclass(slots=True, kw_only=True)
class Project:
    """One compose file, with overlays, up or not. Its published ports are free ones of this machine.

    name: instead of the file's.
    """

    engine: Engine
    file: Path
    overlays: tuple[Path, ...] = ()
    name: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    grpc_port: int = field(default_factory=lambda: free_port())
    http_port: int = field(default_factory=lambda: free_port())

    def __post_init__(self) -> None:
        ports = {"RADIXMESH_GRPC_PORT": str(self.grpc_port), "RADIXMESH_HTTP_PORT": str(self.http_port)}
        environment = {**self.engine.environment, **ports, **self.variables}
        self.engine = Engine(environment=environment, is_ours=False)

    @property
    def router(self) -> str:
        """Address for gRPC clients."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/v1"

    def compose(self, *arguments: str, timeout_s: float = 180.0) -> str:
        files = [word for file in (self.file, *self.overlays) for word in ("-f", str(file))]
        name = ["-p", self.name] if self.name else []
        return self.engine.docker("compose", *name, *files, *arguments, timeout_s=timeout_s)

    def up(self, *arguments: str) -> None:
        """Starts what is not up and waits until all is healthy."""
        self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "280", *arguments, timeout_s=300)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans")

    def containers(self, service: str = "") -> list[str]:
        """Names of running containers, in order of replicas."""
        arguments = ["ps", "--format", "{{.Names}}", *([service] if service else [])]
        return sorted(self.compose(*arguments).split(), key=lambda name: (name.rpartition("-")[0], _number(name)))

    def container(self, service: str, replica: int = 0) -> str:
        return self.containers(service)[replica]

    def inspect(self, container: str) -> dict[str, object]:
        """The engine's whole description of a container."""
        (found,) = json.loads(self.engine.docker("inspect", container))
        return dict(found)

    def state(self, container: str) -> dict[str, object]:
        return json.loads(self.engine.docker("inspect", "-f", "{{json .State}}", container))  # type: ignore[no-any-return]

    def is_healthy(self, container: str) -> bool:
        state = self.state(container)
        health = state.get("Health")
        return state["Status"] == "running" and isinstance(health, dict) and health["Status"] == "healthy"

    def wait_healthy(self, container: str, timeout_s: float = 90.0) -> None:
        until = time.monotonic() + timeout_s
        while not self.is_healthy(container):
            assert time.monotonic() < until, (
                f"{container} is not healthy: {self.state(container)} {self.tail(container)}"
            )
            time.sleep(0.3)

    def kill_process(self, container: str) -> None:
        """kill -9 of the daemon itself: a crash, which is what restart policies are for."""
        pid = self.state(container)["Pid"]
        assert isinstance(pid, int) and pid > 0
        os.kill(pid, signal.SIGKILL)

    def logs(self, container: str) -> list[dict[str, object]]:
        """Everything that the container's daemon logged. Raises ValueError for a line that is no JSON."""
        text = self.engine.logs(container)
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{container} logged what is no JSON: {text[-4000:]}") from error

    def tail(self, container: str) -> str:
        return "\n".join(self.engine.logs(container).splitlines()[-10:])


def _number(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdecimal() else 0


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
