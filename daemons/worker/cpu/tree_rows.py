"""Rows of a segment whose drafts are a tree: what each of them attends to, stands behind and leaves in the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cpu.attention.backend import AttentionSegment, SlotArray
from radixmesh.daemons.worker.kv_pool import kv_slots
from radixmesh.daemons.worker.runner import Segment
from radixmesh.daemons.worker.speculation.draft_tree import runs


def attention_parts(segment: Segment, page_size: int) -> list[AttentionSegment]:
    """The segment as pieces of sequences: one, or the runs of its tree, each behind the rows that it follows. Row n
    writes its KV where position start + n has its own, whatever its depth."""
    start, length = segment.start, len(segment.ids)
    slots = kv_slots(segment.pages, start + length, page_size)
    if not len(segment.parents):
        return [AttentionSegment(start=start, length=length, kv_slots=slots)]
    return [
        AttentionSegment(
            start=start + len(run.path) - run.length,
            length=run.length,
            kv_slots=np.concatenate((slots[:start], slots[start + run.path])),
        )
        for run in runs(segment.parents)
    ]


def drafts_before(segment: Segment) -> list[IntArray]:
    """Of each row that samples, which is the last one, or all of a decode: the drafts between the output and it."""
    if segment.max_tokens is None:
        return [segment.ids[:0]]
    if not len(segment.parents):
        return [segment.ids[1:number] for number in range(1, len(segment.ids) + 1)]
    before = [segment.ids[:0]]
    for row in range(1, len(segment.ids)):
        before.append(np.append(before[segment.parents[row]], segment.ids[row]))
    return before


def accepted_rows(segment: Segment, sampled: Sequence[int], is_stuck: Sequence[bool]) -> list[int]:
    """Of the rows that sample, those whose tokens are output: the first, and drafts that were sampled where they
    follow. is_stuck: rows that nothing may follow."""
    num_rows = len(sampled)
    if num_rows == 1:
        return [0]
    parents = segment.parents if len(segment.parents) else np.arange(-1, num_rows - 1, dtype=np.int32)
    path = [0]
    for row in range(1, num_rows):
        # In preorder the children of a row that is taken come behind it, and those of others are passed by.
        if parents[row] == path[-1] and segment.ids[row] == sampled[path[-1]] and not is_stuck[row]:
            path.append(row)
    return path


class Moves(NamedTuple):
    """KV that moves between tokens of the pool: int64, none of which is both read and, before that, written."""

    sources: SlotArray
    targets: SlotArray


def moves_of(segment: Segment, path: Sequence[int], page_size: int) -> Moves:
    """From where the rows of a path wrote KV to the positions that they turned out to have."""
    rows = np.array(path, np.int64)
    depths = np.arange(len(rows))
    moved = rows != depths
    if not moved.any():
        return Moves(depths[:0], depths[:0])
    slots = kv_slots(segment.pages, segment.start + len(segment.ids), page_size)[segment.start :]
    return Moves(slots[rows[moved]], slots[depths[moved]])
