"""Logs: one line of JSON an event."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from radixmesh.daemons.runtime.telemetry.logs import bind_request, configure_logging, current_request, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    configure_logging("info", "router", "abc", stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers = handlers
    root.setLevel(level)


def _lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_with_who_when_and_what(stream: io.StringIO) -> None:
    get_logger("some.module").info("request_started", prompt_tokens=3, text="a\nb 100% ü", level="high")
    (line,) = _lines(stream)
    assert line.pop("ts")
    assert line == {
        "level": "info",
        "daemon": "router",
        "instance": "abc",
        "logger": "some.module",
        "event": "request_started",
        "prompt_tokens": 3,
        "text": "a\nb 100% ü",
        "level_": "high",
    }


def test_events_below_the_level_are_not_written(stream: io.StringIO) -> None:
    get_logger("m").debug("quiet")
    assert _lines(stream) == []


def test_a_traceback_stays_in_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("m").exception("step_failed", step=4)
    (line,) = _lines(stream)
    assert line["level"] == "error" and line["step"] == 4
    assert "ValueError: boom" in str(line["traceback"])


def test_other_libraries_are_events_too(stream: io.StringIO) -> None:
    logging.getLogger("grpc").warning("lost %s", "peer")
    (line,) = _lines(stream)
    assert (line["event"], line["logger"]) == ("lost peer", "grpc")


async def test_a_request_id_belongs_to_its_task(stream: io.StringIO) -> None:
    async def work(request_id: str) -> None:
        with bind_request(request_id):
            await asyncio.sleep(0)
            get_logger("m").info("worked", mine=request_id)

    await asyncio.gather(*(work(f"r{i}") for i in range(5)))
    get_logger("m").info("idle")
    *worked, idle = _lines(stream)
    assert [line["request_id"] for line in worked] == [line["mine"] for line in worked] and len(worked) == 5
    assert "request_id" not in idle and current_request() == ""


def test_what_nobody_catches_is_one_line_of_json_too() -> None:
    program = (
        "from radixmesh.daemons.runtime.telemetry.logs import configure_logging\n"
        "configure_logging('info', 'router', 'i')\n"
        "class Broken:\n"
        "    def __del__(self): raise ValueError('in a destructor')\n"
        "broken = Broken(); del broken\n"
        "raise KeyError('at the top')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["unraisable_exception", "uncaught_exception"]
    assert "in a destructor" in lines[0]["traceback"] and "at the top" in lines[1]["traceback"]
