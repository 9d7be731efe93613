"""Two halves of a step that take turns on one stream: rows of one travel between ranks while the other computes.

    A  attention | send ...... | experts | send ...... | attention of the next layer
    B              attention | send ...... | experts | send ...... | attention

A forward is a generator that yields wherever rows of its half are under way. The host gives the stream the work of one
half up to there, then that of the other: all in one order, on all ranks alike, also while a graph records it.
Source: the two-batch overlap of DeepSeek-V3 (2024, section 3.2.2), as SGLang has it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep, StepAttention
from radixmesh.kernels.rope_kv import KvTarget

Stages = Generator[None, None, torch.Tensor]
"""A forward in pieces: [T, D] at its end."""


class HalfBatch(NamedTuple):
    """Inputs of `DeviceModel.layers`, of some of a step's rows."""

    x_TD: torch.Tensor
    target: KvTarget
    attention: StepAttention


def take_turns(forwards: Sequence[Stages], begin_turn: Callable[[int], None]) -> list[torch.Tensor]:
    """The results of all. begin_turn(i): called ahead of each piece of forward i."""
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(forwards):
        for index, forward in enumerate(forwards):
            if index in results:
                continue
            begin_turn(index)
            try:
                next(forward)
            except StopIteration as end:
                results[index] = end.value
    return [results[index] for index in range(len(forwards))]


def rows_of(step: DeviceStep, start: int, end: int) -> DeviceStep:
    """Some of the rows of a step of decodes alone."""
    assert not step.num_chunks and step.num_decodes == len(step.row_slots), "the step has chunks"
    rows = slice(start, end)
    return DeviceStep(
        page_tables=step.page_tables,
        row_slots=step.row_slots[rows],
        row_positions=step.row_positions[rows],
        decode_slots=step.decode_slots[rows],
        decode_kv_lens=step.decode_kv_lens[rows],
        chunk_slots=step.chunk_slots,
        chunk_row_starts=step.chunk_row_starts,
        chunk_kv_lens=step.chunk_kv_lens,
        max_chunk_len=0,
        # The plan of the second half comes behind that of the first one, and not behind the step's first kernel.
        is_from_host=False,
    )
