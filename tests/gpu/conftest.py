"""Workers of pytest-xdist take turns on the GPUs of a machine: each sees all of them, another one first."""

from __future__ import annotations

import os
from pathlib import Path


def _turned(worker: str, visible: str | None, num_gpus: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of worker "gw3"; None: as it is."""
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(num_gpus)]
    if not worker.startswith("gw") or len(gpus) < 2:
        return None
    first = int(worker.removeprefix("gw")) % len(gpus)
    return ",".join(gpus[first:] + gpus[:first])


# Before anything has asked CUDA.
_NUM_GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
if turned := _turned(os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("CUDA_VISIBLE_DEVICES"), _NUM_GPUS):
    os.environ["CUDA_VISIBLE_DEVICES"] = turned
