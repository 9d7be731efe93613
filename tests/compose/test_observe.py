"""compose/observe.yml in a Docker engine: Prometheus finds every replica by DNS, those that come later too.

Prometheus is this machine's own program in an image of the daemons' base, since its image may be out of reach; Grafana,
the collector and Jaeger exist as images only and are not started.
"""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.containers import COMPOSE, Project, free_port
from support.engine import Engine

DAEMONS = ("router", "tokenizer", "detokenizer", "scheduler", "worker")
IMAGE = "radixmesh/test-prometheus:local"
DOCKERFILE = """FROM radixmesh/daemons:local
USER root
RUN mkdir /prometheus && chown 65534:65534 /prometheus
COPY prometheus /bin/prometheus
USER 65534:65534
HEALTHCHECK --interval=1s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9090/-/ready')"]
ENTRYPOINT ["/bin/prometheus"]
CMD []
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def project(images: Engine, tmp_path: Path) -> Iterator[Project]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on PATH to put into an image (Debian: apt-get install prometheus)")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    shutil.copy(program, tmp_path / "prometheus")
    images.docker("build", "-q", "--network", "none", "-t", IMAGE, str(tmp_path), timeout_s=120)
    variables = {"PROMETHEUS_IMAGE": IMAGE, "PROMETHEUS_PORT": str(free_port())}
    project = Project(
        engine=images,
        file=COMPOSE / "local.yml",
        overlays=(COMPOSE / "observe.yml",),
        name="radixmesh-observed",
        variables=variables,
    )
    try:
        yield project
    finally:
        project.down()


def targets_up(project: Project) -> Counter[str]:
    """Job -> replicas whose last scrape succeeded."""
    url = f"http://127.0.0.1:{project.variables['PROMETHEUS_PORT']}/api/v1/targets?state=active"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            targets = json.load(answer)["data"]["activeTargets"]
    except OSError:
        return Counter()
    return Counter(target["labels"]["job"] for target in targets if target["health"] == "up")


def wait_for(what: Callable[[], object], expected: object, timeout_s: float = 100.0) -> None:
    until = time.monotonic() + timeout_s
    while (found := what()) != expected:
        assert time.monotonic() < until, f"{found} is not {expected}"
        time.sleep(0.5)


def start(project: Project, *scale: str) -> None:
    """Without a wait for health: metrics are served from the start on."""
    counts = [word for text in scale for word in ("--scale", text)]
    project.compose("up", "--detach", "--no-build", "--no-deps", "--no-recreate", *counts, *DAEMONS, "prometheus")


def test_every_replica_is_scraped_also_those_that_come_later(project: Project) -> None:
    start(project, "tokenizer=2")
    wait_for(lambda: targets_up(project), Counter(dict.fromkeys(DAEMONS, 1) | {"tokenizer": 2}))
    # Nobody listens at the collector's address: daemons are there all the same.
    assert "otel-collector" not in " ".join(project.containers())
    start(project, "tokenizer=3", "detokenizer=2")
    wait_for(lambda: targets_up(project), Counter(dict.fromkeys(DAEMONS, 1) | {"tokenizer": 3, "detokenizer": 2}))
