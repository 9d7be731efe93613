"""Steps of decodes alone, of the first slots of a runner, from their first position on."""

from __future__ import annotations

import numpy as np
import torch

from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import DecodeRows

PAGES_OF_SLOT = 128


def decode_alone(runner: DeviceRunner, num_rows: int, num_steps: int, *, lag: int) -> list[list[int]]:
    """Tokens of all rows by step; pages have one token. Each row begins with another id. lag: steps whose results are
    not asked for when the next one is launched."""
    with torch.inference_mode():
        runner.slots.last_tokens[:num_rows] = torch.arange(3, 3 + num_rows, dtype=torch.int32)
    launched = []
    tokens: list[list[int]] = []
    for position in range(num_steps):
        launched.append(runner.launch(_rows(num_rows, position), (), 0))
        while len(launched) - len(tokens) > lag:
            tokens.append(launched[len(tokens)].result().tokens.tolist())
    return tokens + [step.result().tokens.tolist() for step in launched[len(tokens) :]]


def _rows(num_rows: int, position: int) -> DecodeRows:
    """Each slot has pages of its own."""
    pages = np.arange(num_rows * PAGES_OF_SLOT, dtype=np.int32).reshape(num_rows, PAGES_OF_SLOT)
    return DecodeRows(
        slots=np.arange(num_rows, dtype=np.int32),
        ids=np.zeros(num_rows, np.int32),
        positions=np.full(num_rows, position, np.int32),
        page_tables=pages,
        num_pages=np.full(num_rows, position + 1, np.int32),
        seeds=np.zeros(num_rows, np.uint64),
        is_sampled=np.zeros(num_rows, np.bool_),
    )
