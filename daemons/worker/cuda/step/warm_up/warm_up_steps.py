"""Warm-up steps: the first steps of a worker are slow on host and device, so they run before any request does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.runner import DecodeRows, SampleInput, Segment

_PROMPT_LEN = 128


def warm_up_steps(
    *, num_slots: int, max_prompt_len: int, max_tokens_per_step: int, num_decodes: int
) -> Iterator[tuple[DecodeRows, Sequence[Segment]]]:
    """One prompt, as many prompts as a step takes, then decodes of one row. All are in the dummy slot, which is the
    last one and whose pages are the dummy page."""
    none = np.zeros(1, np.int32)
    tables, num_pages = np.zeros((num_slots + 1, 1), np.int32), np.zeros(num_slots + 1, np.int32)
    length = min(_PROMPT_LEN, max_prompt_len, max_tokens_per_step)
    sample = SampleInput(sampling=Sampling(temperature=0.0), prompt_ids=none, output_ids=none[:0], position=length)
    prompt = Segment(slot=num_slots, ids=np.zeros(length, np.int32), start=0, pages=none[:0], sample=sample)
    for count in sorted({1, min(max_tokens_per_step // length, num_slots)}):
        yield replace(no_rows(), page_tables=tables, num_pages=num_pages), [prompt] * count
    rows = DecodeRows(
        slots=none + num_slots,
        ids=none,
        positions=none,
        page_tables=tables,
        num_pages=num_pages,
        seeds=none.astype(np.uint64),
        is_sampled=none.astype(np.bool_),
    )
    for _ in range(num_decodes):
        yield rows, ()
