"""Cost of a topology's containers: image sizes, `up` to the first token, memory at rest. Writes JSON.

    python bench/compose_start.py compose/local.yml bench/results/compose-local.json

Needs a Docker engine (`docker` on PATH) with the images built, and the published ports free. Takes the mesh down again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path

from radixmesh.client import AsyncClient

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REST_S = 10.0


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout


async def first_token_s(address: str, started: float) -> float:
    """Seconds since `started` at which the first token of a stream came. The client waits for the mesh."""
    async with AsyncClient([address], resume_timeout_s=300) as client:
        async for chunk in client.generate("The Tyger", max_tokens=16):
            if chunk.ids:
                return time.monotonic() - started
    raise SystemExit("the stream ended without a token")


def memory_mib() -> dict[str, float]:
    """Container -> resident memory that the engine counts, in MiB."""
    lines = docker("stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}").splitlines()
    found = {}
    for line in lines:
        match = re.match(r"(\S+) ([\d.]+)([KMG]?i?B)", line)
        assert match, line
        found[match[1]] = round(float(match[2]) * _UNITS[match[3]] / (1 << 20), 1)
    return dict(sorted(found.items()))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("compose_file")
    parser.add_argument("result", type=Path)
    parser.add_argument("--router", default=f"127.0.0.1:{os.environ.get('RADIXMESH_GRPC_PORT', '50050')}")
    options = parser.parse_args()
    compose = ("compose", "-f", options.compose_file)
    images = sorted(
        {
            service["image"]
            for service in json.loads(docker(*compose, "config", "--format", "json"))["services"].values()
        }
    )
    sizes = {image: round(int(docker("image", "inspect", "-f", "{{.Size}}", image)) / 1e6) for image in images}
    load_before = os.getloadavg()[0]
    started = time.monotonic()
    try:
        docker(*compose, "up", "--detach", "--no-build")
        up_s = time.monotonic() - started
        first_s = await first_token_s(options.router, started)
        await asyncio.sleep(_REST_S)
        memory = memory_mib()
    finally:
        stopping = time.monotonic()
        docker(*compose, "down", "--volumes")
    result = {
        "command": f"python bench/compose_start.py {options.compose_file} {options.result}",
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "load_average_before": round(load_before, 2)},
        "engine": docker("version", "--format", "{{.Server.Version}}").strip(),
        "image_megabytes": sizes,
        "up_returned_s": round(up_s, 1),
        "up_to_first_token_s": round(first_s, 1),
        "memory_at_rest_mib": memory,
        "down_s": round(time.monotonic() - stopping, 1),
    }
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
