"""Metrics: names, counting, and the HTTP endpoint."""

import re
import urllib.request

import pytest
from prometheus_client import generate_latest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.metrics import Metrics, serve_metrics


def test_every_metric_has_our_prefix_and_help() -> None:
    families = list(Metrics().registry.collect())
    assert len(families) > 20
    for family in families:
        assert re.fullmatch(r"radixmesh_[a-z_]+", family.name)
        assert family.documentation.endswith(".")


def test_two_daemons_of_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.steps.inc(3)
    assert first.registry.get_sample_value("radixmesh_steps_total") == 3
    assert second.registry.get_sample_value("radixmesh_steps_total") == 0


def test_errors_are_counted_by_reason() -> None:
    metrics = Metrics()
    metrics.count_error(MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "later"))
    assert metrics.registry.get_sample_value("radixmesh_errors_total", {"reason": "OVERLOADED"}) == 1


def test_the_endpoint_serves_the_registry_and_frees_its_port() -> None:
    metrics = Metrics()
    metrics.output_tokens.inc(7)
    endpoint = serve_metrics(metrics, "127.0.0.1:0")
    with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=5) as answer:
        text = answer.read()
    endpoint.close()
    assert b"radixmesh_output_tokens_total 7.0" in text
    assert text.count(b"# HELP") == generate_latest(metrics.registry).count(b"# HELP")
    again = serve_metrics(metrics, endpoint.address)
    again.close()


def test_a_bad_address_is_refused() -> None:
    with pytest.raises(MeshError, match="host:port"):
        serve_metrics(Metrics(), "unix:/tmp/metrics")
