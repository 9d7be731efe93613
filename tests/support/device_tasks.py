"""Embed and score tasks driven through a device's runner, and the vectors of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.runner import Segment
from support.rounding import model_tolerance

PAGE_SIZE = 4
_LENGTHS = (1, 50, 37)
PAGES = 15


def prompts() -> list[np.ndarray]:
    return [np.random.default_rng(length).integers(0, 131, length).astype(np.int32) for length in _LENGTHS]


def vectors(runner: DeviceRunner, task: Task, chunk_len: int) -> list[np.ndarray]:
    """Of all prompts, a chunk of each in a step; the result of a step is asked for when the next one is launched."""
    tables = np.arange(3 * PAGES, dtype=np.int32).reshape(3, PAGES)
    rows = replace(no_rows(), page_tables=tables, num_pages=np.full(3, PAGES, np.int32))
    launched = []
    for start in range(0, max(_LENGTHS), chunk_len):
        segments = [
            Segment(
                slot=slot,
                ids=ids[start : start + chunk_len],
                start=start,
                pages=tables[slot],
                task=task,
                is_last_chunk=start + chunk_len >= len(ids),
            )
            for slot, ids in enumerate(prompts())
            if start < len(ids)
        ]
        launched.append((segments, runner.launch(rows, segments, 0)))
    found: dict[int, np.ndarray] = {}
    for segments, step in launched:
        for segment, output in zip(segments, step.result().segments, strict=True):
            assert output.token is None and (output.vector is not None) == segment.is_last_chunk
            if output.vector is not None:
                assert output.vector.dtype == np.float32
                found[segment.slot] = output.vector
    return [found[slot] for slot in range(len(_LENGTHS))]


@torch.inference_mode()
def hidden(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    hidden: torch.Tensor = model.model(torch.from_numpy(ids).long()[None]).last_hidden_state[0]
    return hidden


def check(got: Sequence[np.ndarray], want: Sequence[torch.Tensor], model: torch.nn.Module) -> None:
    for vector, expected in zip(got, want, strict=True):
        atol = model_tolerance(model.config, max(_LENGTHS), float(expected.abs().max()))
        np.testing.assert_allclose(vector, expected.numpy(), rtol=0, atol=atol)
