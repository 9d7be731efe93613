"""Tracing that is off costs nothing; what is no context is none; a collector that is away holds nobody up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.tracing import NoTracer, is_traceparent, make_tracer

CONTEXT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_daemons_without_tracing_import_no_opentelemetry() -> None:
    program = (
        "import sys\n"
        "from radixmesh.daemons.router import daemon\n"
        "from radixmesh.daemons.tokenizer import daemon\n"
        "from radixmesh.daemons.detokenizer import daemon\n"
        "from radixmesh.daemons.scheduler import __main__\n"
        "from radixmesh.daemons.worker import core\n"
        "from radixmesh.daemons.runtime.telemetry.tracing import make_tracer\n"
        "tracer = make_tracer(None, 'router', 'i', {})\n"
        "assert not tracer.is_on and not tracer.root('a', '', {}).context\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    command = [sys.executable, "-c", program]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_flag_or_opentelemetrys_own_variables_turn_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert isinstance(make_tracer(None, "router", "i", {}), NoTracer)
    assert isinstance(make_tracer(None, "router", "i", variable | {"OTEL_SDK_DISABLED": "true"}), NoTracer)
    for tracer in (make_tracer("http://127.0.0.1:9", "router", "i", {}), make_tracer(None, "router", "i", variable)):
        assert tracer.is_on
        tracer.close()
    # None in sys.modules: not installed.
    monkeypatch.delitem(sys.modules, "radixmesh.daemons.runtime.telemetry.otel_tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MeshError, match=r"radixmesh\[otel\]"):
        make_tracer("http://127.0.0.1:9", "router", "i", {})


def test_what_counts_as_a_context() -> None:
    wrong = ("", CONTEXT.upper(), CONTEXT[:-1], CONTEXT + "-x", CONTEXT + "\n", "ff" + CONTEXT[2:])
    wrong += (f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01")
    cases = {CONTEXT: True, "01" + CONTEXT[2:]: True, **dict.fromkeys(wrong, False)}
    tracer = make_tracer("http://127.0.0.1:9", "worker", "i", {})
    try:
        for text, is_one in cases.items():
            assert is_traceparent(text) is is_one, text
            root = tracer.root("a", text, {})
            assert is_traceparent(root.context) and (root.context[3:35] == CONTEXT[3:35]) is is_one, text
            assert bool(tracer.begin("b", text, {}).context) is is_one, "only routers begin traces"
    finally:
        tracer.close()


def test_a_collector_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    held, ended = threading.Event(), threading.Event()

    def shutdown(_: object) -> None:
        held.wait(100)
        ended.set()

    monkeypatch.setattr("opentelemetry.sdk.trace.TracerProvider.shutdown", shutdown)
    monkeypatch.setattr("radixmesh.daemons.runtime.telemetry.otel_tracing._CLOSE_S", 0.1)
    tracer = make_tracer("http://127.0.0.1:9", "router", "i", {})
    tracer.root("a", "", {}).end({})
    tracer.close()
    tracer.close()
    assert not ended.is_set(), "the end waited for the collector"
    held.set()
