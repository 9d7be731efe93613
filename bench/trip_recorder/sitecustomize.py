"""Recorder of the Python functions that a process enters, and when.

Every interpreter with this folder on PYTHONPATH loads it. TRIP_FOLDER: where the process writes `PID.json` when it
ends, rows of [file, function, times of entry in seconds of CLOCK_MONOTONIC, which all processes of a machine share].
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from array import array
from pathlib import Path
from types import CodeType, FrameType

_SOURCES = ("/daemons/", "/kernels/", "/clients/")
_MAX_ENTRIES = 20_000  # of one function: background work must not fill the memory

_entries: dict[CodeType, array[float]] = {}


def _on_event(frame: FrameType, event: str, _argument: object) -> None:
    if event != "call":
        return
    code = frame.f_code
    times = _entries.get(code)
    if times is None:
        times = _entries[code] = array("d")
    if len(times) < _MAX_ENTRIES:
        times.append(time.monotonic())


def _write(folder: Path) -> None:
    sys.setprofile(None)
    rows = [
        [path, code.co_qualname, list(times)]
        for code, times in list(_entries.items())
        if code.co_name != "<module>"
        and any(part in (path := os.path.realpath(code.co_filename)) for part in _SOURCES)
        and "site-packages" not in path
    ]
    name = " ".join(sys.argv)
    (folder / f"{os.getpid()}.json").write_text(json.dumps({"argv": name, "entries": rows}))


if "TRIP_FOLDER" in os.environ:
    atexit.register(_write, Path(os.environ["TRIP_FOLDER"]))
    threading.setprofile(_on_event)
    sys.setprofile(_on_event)
