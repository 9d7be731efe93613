"""A compose file of processes that do nothing but serve health: a router, and the workers that it depends on."""

from __future__ import annotations

from pathlib import Path

FAKE_DAEMON = Path(__file__).parents[1] / "mesh" / "fake_daemon.py"


def fake_compose(
    *, grace: str = "1s", timeout: str = "200ms", retries: int = 10, start_period: str = "20s", num_workers: int = 1
) -> str:
    return f"""
name: fakes
x-fake: &fake
  command: [python, {FAKE_DAEMON}]
  restart: unless-stopped
  stop_grace_period: {grace}
  healthcheck: &health
    test: [CMD, radixmesh, health, "127.0.0.1:50051"]
    interval: 100ms
    timeout: {timeout}
    retries: {retries}
    start_period: {start_period}
    start_interval: 50ms
services:
  router:
    <<: *fake
    environment: {{RADIXMESH_LISTEN: "0.0.0.0:50051", FAKE_PEERS: "worker:50051"}}
    depends_on: {{worker: {{condition: service_healthy}}}}
  worker:
    <<: *fake
    deploy: {{replicas: {num_workers}}}
    environment: {{RADIXMESH_LISTEN: "0.0.0.0:50051"}}
"""
