"""A rolling replacement of all daemons under load, and kills among replicas: what clients see of them.

compose/scale.yml as local processes with CPU workers of the tiny model. Streams: texts, chats, n = 2, sampled and
guided ones, each compared with its known answer; plain HTTP clients go through the front. Printed is one JSON:
failures, gaps between two chunks of a stream (quiet, and during each roll), seconds from leaving to ready.

    python bench/roll.py --streams 64 --rolls 2 > bench/results/roll.json
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

from support.roll_run import kill_replicas, roll_under_load  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams open at a time")
    parser.add_argument("--rolls", type=int, default=2, help="how often all daemons are replaced")
    parser.add_argument("--kills", type=int, default=0, help="instead of rolls: SIGKILLs of each kind")
    parser.add_argument("--pairs", type=int, default=4, help="with --kills: pairs of scheduler and worker")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if options.kills:
            run = kill_replicas(Path(folder), num_streams=options.streams, num_each=options.kills, pairs=options.pairs)
        else:
            run = roll_under_load(Path(folder), num_streams=options.streams, num_rolls=options.rolls)
        report = asyncio.run(run)
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_before": round(load_before, 1),
    }
    machine |= {f"{name}": metadata.version(name) for name in ("grpcio", "protobuf")}
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "machine": machine, **report}, indent=1))
    return bool(report["failures"])


if __name__ == "__main__":
    sys.exit(main())
