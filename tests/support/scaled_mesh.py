"""compose/scale.yml as local processes: several pairs of scheduler and worker behind two routers and a front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from support.jobs import MODELS
from support.mesh import BUGS, COMPOSE, Mesh

# The file has two: a and b.
PAIRS = "abcd"
_HEALTH = """
    healthcheck:
      test: ["CMD", "radixmesh", "health", "127.0.0.1:50051", "--timeout", "9"]
      x-local: {interval: 1s, timeout: 1s, retries: 5, start_period: 60s, start_interval: 200ms}
    restart: unless-stopped
    stop_grace_period: 35s
"""


@asynccontextmanager
async def scaled_mesh(
    folder: Path,
    *,
    pairs: int = 2,
    worker: Mapping[str, object] | None = None,
    settings: Mapping[str, Mapping[str, object]] | None = None,
    timeout_s: float = 300.0,
) -> AsyncIterator[Mesh]:
    """A healthy mesh; its client knows both routers. folder: of files that are written for it.

    worker: settings of all workers. settings: of other services, by name.
    """
    names = PAIRS[:pairs]
    environment = {f"worker-{name}": _variables(worker or {}) for name in names}
    environment |= {f"scheduler-{name}": {"RADIXMESH_CHECK_INVARIANTS": "true"} for name in names}
    for service, values in (settings or {}).items():
        environment[service] = {**environment.get(service, {}), **_variables(values)}
    overlay = folder / "pairs.yml"
    overlay.write_text(_more_pairs(names))
    bugs: list[str] = []

    def on_line(name: str, line: str) -> None:
        if any(bug in line for bug in BUGS):
            bugs.append(f"{name}: {line}")

    cluster = LocalCluster((COMPOSE / "scale.yml", overlay), environment=environment, publish=False, on_line=on_line)
    async with cluster:
        await cluster.wait_healthy(timeout_s)
        routers = [cluster.address("router", replica) for replica in (1, 2)]
        async with AsyncClient(routers) as client:
            yield Mesh(cluster=cluster, client=client, routers=routers, bugs=bugs)


def _more_pairs(names: str) -> str:
    schedulers = ",".join(f"scheduler-{name}:50051" for name in names)
    # Plain HTTP answers last for minutes where many streams share two cores, and nothing resumes them.
    text = "services:\n  router:\n    stop_grace_period: 310s\n"
    text += f"    environment: {{RADIXMESH_SCHEDULERS: '{schedulers}', RADIXMESH_DRAIN_S: '300'}}\n"
    common = "RADIXMESH_LISTEN: 0.0.0.0:50051"
    for name in names[2:]:
        text += f"  worker-{name}:{_HEALTH}"
        text += '    command: ["radixmesh", "worker"]\n'
        text += f"    environment: {{{common}, RADIXMESH_MODEL: /models/tiny-llama, RADIXMESH_BACKEND: cpu,"
        text += " RADIXMESH_CPU_THREADS: 1}\n"
        text += f'    volumes: ["{MODELS / "tiny-llama"}:/models/tiny-llama:ro"]\n'
        text += f"  scheduler-{name}:{_HEALTH}"
        text += '    command: ["radixmesh", "scheduler"]\n'
        text += f"    environment: {{{common}, RADIXMESH_WORKERS: 'worker-{name}:50051'}}\n"
        text += f"    depends_on: {{worker-{name}: {{condition: service_healthy}}}}\n"
    return text


def _variables(settings: Mapping[str, object]) -> dict[str, str]:
    return {f"RADIXMESH_{name.upper()}": str(value) for name, value in settings.items()}
