"""Rows of several steps as one row an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.scheduler.results.outputs import TokenRows


def compacted(parts: Sequence[TokenRows]) -> TokenRows:
    """The same tokens and logprobs, one row per handle."""
    merged, logprobs = merge_rows(parts)
    return replace(merged, logprobs={row: _joined(values) for row, values in logprobs.items()})


def merge_rows(parts: Sequence[TokenRows]) -> tuple[TokenRows, dict[int, list[TokenLogprobs]]]:
    """Rows of several steps as one row per handle, in the order of the steps; logprobs by merged row."""
    if len(parts) == 1:
        return parts[0], {row: [value] for row, value in parts[0].logprobs.items()}
    handles = np.concatenate([part.handles for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    ids = np.concatenate([part.ids for part in parts])
    order = np.argsort(handles, kind="stable")
    is_new = np.diff(handles[order], prepend=handles[order][0] - 1) != 0
    heads = np.flatnonzero(is_new)
    starts = (np.cumsum(counts) - counts)[order]
    lengths = counts[order]
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first_rows = order[heads]

    def column(name: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        values: np.ndarray[tuple[int], np.dtype[np.int32]] = np.concatenate([getattr(part, name) for part in parts])
        return values[first_rows]

    merged = TokenRows(
        owners=column("owners"),
        handles=column("handles"),
        attempts=column("attempts"),
        firsts=column("firsts"),
        counts=np.add.reduceat(lengths, heads).astype(np.int32),
        ids=ids[np.repeat(starts, lengths) + within],
    )
    return merged, _merged_logprobs(parts, order, is_new)


def _merged_logprobs(
    parts: Sequence[TokenRows], order: np.ndarray[tuple[int], np.dtype[np.int64]], is_new: np.ndarray
) -> dict[int, list[TokenLogprobs]]:
    if not any(part.logprobs for part in parts):
        return {}
    flat: dict[int, TokenLogprobs] = {}
    offset = 0
    for part in parts:
        flat.update({offset + row: value for row, value in part.logprobs.items()})
        offset += len(part)
    merged_rows = (np.cumsum(is_new) - 1).tolist()
    grouped: dict[int, list[TokenLogprobs]] = {}
    for row, merged_row in zip(order.tolist(), merged_rows, strict=True):
        if row in flat:
            grouped.setdefault(merged_row, []).append(flat[row])
    return grouped


def _joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Logprobs of consecutive tokens of one output."""
    return TokenLogprobs(
        own=np.concatenate([part.own for part in parts]),
        num_top=parts[0].num_top,
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )
