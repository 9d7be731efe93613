"""Metrics: names, counting, and the HTTP endpoint."""

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.metric_maker import FastHistogram, MetricMaker
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.metrics_server import serve_metrics
from radixmesh.daemons.runtime.telemetry.metrics_table import with_table


def test_every_metric_has_our_prefix_and_help() -> None:
    families = list(Metrics().registry.collect())
    assert len(families) > 20
    for family in families:
        assert re.fullmatch(r"radixmesh_[a-z0-9_]+", family.name)
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
    with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=60) as answer:
        text = answer.read()
    endpoint.close()
    assert b"radixmesh_output_tokens_total 7.0" in text
    assert text.count(b"# HELP") == generate_latest(metrics.registry).count(b"# HELP")
    again = serve_metrics(metrics, endpoint.address)
    again.close()


def test_a_bad_address_is_refused() -> None:
    with pytest.raises(MeshError, match="host:port"):
        serve_metrics(Metrics(), "unix:/tmp/metrics")


def test_a_daemon_serves_what_concerns_it() -> None:
    router, everything = Metrics("router"), Metrics()
    router.steps.inc()  # Not its own: may be set, is not served.
    names = {family.name for family in router.registry.collect()}
    assert "radixmesh_time_to_first_token_seconds" in names and "radixmesh_steps" not in names
    served = [{f.name for f in Metrics(d).registry.collect()} for d in ("router", "tokenizer", "worker")]
    assert all("radixmesh_errors" in names for names in served) and len(set(map(len, served))) == 3
    assert {i.name.removesuffix("_total") for i in everything.infos} == {f.name for f in everything.registry.collect()}


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram", "fast_histogram"])
def test_a_deprecated_name_gives_the_samples_of_the_new_one(kind: str) -> None:
    make = MetricMaker("router")
    if kind == "counter":
        make.counter("radixmesh_new_total", "router", "New.", ["a"], deprecated="radixmesh_old_total").labels("x").inc()
    elif kind == "gauge":
        make.gauge("radixmesh_new", "router", "New.", ["a"], deprecated="radixmesh_old").labels("x").set(3)
    elif kind == "histogram":
        make.histogram("radixmesh_new", "router", "New.", (1, 2), deprecated="radixmesh_old").observe(1.5)
    else:
        make.fast_histogram("radixmesh_new", "router", "New.", (1, 2), deprecated="radixmesh_old").observe(1.5)
    new, old = make.registry.collect()
    assert (old.name, old.type) == (new.name.replace("new", "old"), new.type)
    assert old.documentation.startswith("Deprecated: radixmesh_new")
    assert old.samples == [s._replace(name=s.name.replace("new", "old")) for s in new.samples] and old.samples
    assert [(i.name.removesuffix("_total"), i.replaced_by.removesuffix("_total")) for i in make.infos] == [
        ("radixmesh_new", ""),
        ("radixmesh_old", "radixmesh_new"),
    ]
    elsewhere = MetricMaker("worker")
    elsewhere.gauge("radixmesh_new", "router", "New.", deprecated="radixmesh_old")
    assert list(elsewhere.registry.collect()) == []


def test_the_fast_histogram_gives_what_the_other_does() -> None:
    fast, plain = CollectorRegistry(), CollectorRegistry()
    ours = FastHistogram("t_seconds", "Time.", (0.1, 1.0, 2.5))
    fast.register(ours)
    theirs = Histogram("t_seconds", "Time.", buckets=(0.1, 1.0, 2.5), registry=plain)
    for value in (0.0, 0.1, 0.100001, 1.0, 2.0, 2.5, 99.0):
        ours.observe(value)
        theirs.observe(value)
    created = re.compile(rb".*t_seconds_created.*\n")
    assert created.sub(b"", generate_latest(plain)) == generate_latest(fast)
    assert generate_latest(fast).count(b"t_seconds_bucket") == 4


def test_the_documented_metrics_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    assert page == with_table(page), (
        "run: python -m radixmesh.daemons.runtime.telemetry.metrics_table docs/observability.md"
    )
    with pytest.raises(ValueError, match="has no"):
        with_table("no marks")
