"""The files that a prompt passes from HTTP to its first token, counted by tracing a whole mesh. CPU only.

    python bench/trip.py [--json FILE] [--write docs/trip.md]

Starts `compose/simulated.yml` as local processes with a recorder of function calls in each (`trip_recorder/`), lets
the mesh idle, then sends prompts to /v1/completions, streamed, one after the other. A file counts if one of its
functions is entered between the request and its first token, for most prompts, and not by chance: an idle mesh enters
it less than once in ten such times. Generated stubs and libraries do not count. --write puts the list, with the first
sentence of each file's docstring, between the page's `trip` markers.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import http.client
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from radixmesh.daemons.cluster.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[1]
DAEMONS = ("router", "tokenizer", "detokenizer", "scheduler", "worker")
_PROMPTS = ("I met a traveller from an antique land", "The Tyger", "Call me Ishmael.", "Lorelei", "Jabberwocky")
_IDLE_S = 5.0
_PAUSE_S = 1.0  # longer than what a request leaves to be done after its end
_MAX_BY_CHANCE = 0.1
_MAX_LINE = 160  # of pages
_MARKERS = re.compile(r"(<!-- trip[^>]*-->\n).*?(<!-- end of trip -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Window:
    """A time in seconds of CLOCK_MONOTONIC."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Visit:
    """One file that one daemon entered. after_ms: from the request to the first entry, median of the prompts."""

    daemon: str
    path: str
    function: str
    after_ms: float
    num_functions: int


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        idle, trips = asyncio.run(_drive(args.compose, Path(folder)))
        visits = _visits(Path(folder), idle, trips)
    files = {visit.path for visit in visits}
    for visit in visits:
        label = f"{visit.daemon:<12}{visit.path}"
        print(f"{visit.after_ms:8.2f} ms  {label}  ({visit.function}, {visit.num_functions} functions)")
    print(f"{len(files)} files, {len(visits)} with those that several daemons enter counted for each")
    for daemon in DAEMONS:
        print(f"{daemon:<12}{sum(visit.daemon == daemon for visit in visits)}")
    if args.json is not None:
        rows = [{name: getattr(visit, name) for name in Visit.__slots__} for visit in visits]
        args.json.write_text(json.dumps({"num_files": len(files), "visits": rows}, indent=1) + "\n")
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        args.write.write_text(_MARKERS.sub(lambda found: found[1] + _table(visits) + found[2], page), encoding="utf-8")
    return 0


async def _drive(compose: Path, folder: Path) -> tuple[Window, list[Window]]:
    """Runs the mesh. Returns the window in which it idled, and one for each prompt. Recorders write when it stops."""
    recorder = {"PYTHONPATH": str(ROOT / "bench" / "trip_recorder"), "TRIP_FOLDER": str(folder)}
    async with LocalCluster(compose, environment=dict.fromkeys(DAEMONS, recorder), publish=False) as cluster:
        await cluster.wait_healthy(120)
        address = cluster.address("router", container_port=8000)
        # Functions that run once only (imports, channels, estimates of step times) are not part of a prompt's trip.
        for number in range(3):
            await asyncio.to_thread(_time_to_first_token, address, f"{number} times before")
        await asyncio.sleep(_PAUSE_S)
        idle = Window(time.monotonic(), time.monotonic() + _IDLE_S)
        await asyncio.sleep(_IDLE_S)
        trips = []
        for prompt in _PROMPTS:
            trips.append(await asyncio.to_thread(_time_to_first_token, address, prompt))
            await asyncio.sleep(_PAUSE_S)
    return idle, trips


def _time_to_first_token(address: str, prompt: str) -> Window:
    """From before the connection is opened to when the first event is here. The stream is read to its end."""
    host, _, port = address.rpartition(":")
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True})
    start = time.monotonic()
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        line = response.readline()
        end = time.monotonic()
        rest = response.read()
    finally:
        connection.close()
    if response.status != 200 or not line.startswith(b"data: {") or b"[DONE]" not in rest:
        raise RuntimeError(f"HTTP {response.status}: {(line + rest).decode()[:500]}")
    return Window(start, end)


def _visits(folder: Path, idle: Window, trips: list[Window]) -> list[Visit]:
    """The files that the recorders saw, in the order of first entries."""
    visits = []
    for record in sorted(folder.glob("*.json")):
        process = json.loads(record.read_text())
        daemon = next((name for name in DAEMONS if name in process["argv"].split()), None)
        if daemon is None:
            continue
        by_file: dict[str, list[tuple[float, str]]] = {}
        for path, function, times in process["entries"]:
            idle_rate = sum(idle.start <= moment < idle.end for moment in times) / (idle.end - idle.start)
            if idle_rate * median(trip.end - trip.start for trip in trips) > _MAX_BY_CHANCE:
                continue
            after = [
                min((moment - trip.start for moment in times if trip.start <= moment < trip.end), default=None)
                for trip in trips
            ]
            entered = [moment for moment in after if moment is not None]
            if len(entered) > len(trips) / 2:
                by_file.setdefault(str(Path(path).relative_to(ROOT)), []).append((median(entered), function))
        for path, entries in by_file.items():
            after_s, function = min(entries)
            visits.append(Visit(daemon, path, function, after_s * 1e3, len(entries)))
    missing = set(DAEMONS) - {visit.daemon for visit in visits}
    if missing:
        raise RuntimeError(f"no function of {', '.join(sorted(missing))} was entered: was it recorded?")
    return sorted(visits, key=lambda visit: visit.after_ms)


def _table(visits: Iterable[Visit]) -> str:
    """A Markdown table of the files by daemon: the order of daemons and files is that of first entries."""
    rows: dict[str, list[str]] = {}
    for visit in visits:
        rows.setdefault(visit.path, []).append(visit.daemon)
    lines = [f"{len(rows)} files.", "", "| file | daemon | purpose |", "|---|---|---|"]
    for path, daemons in rows.items():
        names = "all" if len(daemons) == len(DAEMONS) else ", ".join(daemons)
        row = f"| `{path}` | {names} | "
        lines.append(f"{row}{_purpose(ROOT / path, _MAX_LINE - len(row) - 2)} |")
    return "\n".join(lines) + "\n"


def _purpose(path: Path, most: int) -> str:
    """The first sentence of the file's docstring, or as many of its clauses as `most` characters hold."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    sentence = re.split(r"(?<=\.) ", text, maxsplit=1)[0].replace("|", "\\|")
    while len(sentence) > most and (cut := max(sentence.rfind(mark) for mark in (":", ";", ","))) > 0:
        sentence = sentence[:cut]
    return sentence.rstrip(".") + "."


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compose", type=Path, default=ROOT / "compose" / "simulated.yml", help="what to start")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the visits there")
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="write the list into this page")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
