"""A rolling replacement of all daemons under load, and kills among replicas: what clients see of them.

compose/scale.yml as local processes with CPU workers of the tiny model. Streams: texts, chats, n = 2, sampled and
guided ones, each compared with its known answer; plain HTTP clients go through the front. Printed is one JSON:
failures, gaps between two chunks of a stream (quiet, and during each roll), seconds from leaving to ready.

    python bench/roll.py --streams 64 --rolls 2 > bench/results/roll.json
    python bench/roll.py --docker --streams 12 > bench/results/roll-docker.json      # in containers
    python bench/roll.py --kills 10 --pairs 4 > bench/results/replica-kills.json      # of scheduler, worker and router
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.docker_roll_run import roll_containers_under_load, scaled_project  # noqa: E402
from support.engine import find_or_start_engine  # noqa: E402
from support.images import build_images  # noqa: E402
from support.roll_run import Report, kill_replicas, roll_under_load  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams open at a time")
    parser.add_argument("--rolls", type=int, default=2, help="how often all daemons are replaced")
    parser.add_argument("--kills", type=int, default=0, help="instead of rolls: SIGKILLs of each kind")
    parser.add_argument("--pairs", type=int, default=4, help="with --kills: pairs of scheduler and worker")
    parser.add_argument("--docker", action="store_true", help="containers and simulated workers instead")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(_run(options, Path(folder)))
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_before": round(load_before, 1),
    }
    machine |= {f"{name}": metadata.version(name) for name in ("grpcio", "protobuf")}
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": machine, **report}, indent=1))
    return bool(report["failures"])


async def _run(options: argparse.Namespace, folder: Path) -> Report:
    if options.docker:
        return await _roll_in_docker(options, folder)
    if options.kills:
        return await kill_replicas(folder, num_streams=options.streams, num_each=options.kills, pairs=options.pairs)
    return await roll_under_load(folder, num_streams=options.streams, num_rolls=options.rolls)


async def _roll_in_docker(options: argparse.Namespace, folder: Path) -> Report:
    engine = find_or_start_engine()
    try:
        build_images(engine)
        with scaled_project(engine, folder) as project:
            return await roll_containers_under_load(project, num_streams=options.streams, num_rolls=options.rolls)
    finally:
        engine.stop()


if __name__ == "__main__":
    sys.exit(main())
