"""Runs embed tasks through an encoder on CPUs: a prompt is computed as a whole when its last chunk is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu.pooling import HiddenPool
from radixmesh.daemons.worker.models.encoder.model import EncoderModel
from radixmesh.daemons.worker.runner import ModelRunner, Segment, SegmentOutput

# Pages are counted as for any model, but an encoder keeps nothing in them.
_DEFAULT_TOKENS = 262_144


class EncoderRunner(ModelRunner):
    """Chunks before the last one are only remembered, by slot: at most max_total_len ids each."""

    def __init__(
        self,
        model: EncoderModel,
        hidden_pool: HiddenPool,
        *,
        page_size: int,
        num_pages: int | None,
        max_total_len: int,
        num_threads: int,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages or max(1, _DEFAULT_TOKENS // page_size)
        self.vocab_size = model.config.vocab_size
        self.max_total_len = max_total_len
        self.is_deterministic = True
        self.tasks = frozenset({Task.EMBED})
        self._model = model
        self._hidden_pool = hidden_pool
        self._num_threads = num_threads
        self._known: dict[int, list[IntArray]] = {}

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        # The number of threads is a property of the calling thread, and part of what fixes the bits.
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        return [SegmentOutput(vector=self._vector(segment)) for segment in segments]

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        return

    def clear(self) -> None:
        self._known.clear()

    def _vector(self, segment: Segment) -> FloatArray | None:
        """float32 [hidden] with the last chunk of a prompt, else None."""
        assert segment.task is Task.EMBED, segment.task
        chunks = self._known.pop(segment.slot, [])
        if segment.start == 0:  # Also where a prompt that was aborted has left chunks in the slot.
            chunks = []
        chunks.append(segment.ids)
        if not segment.is_last_chunk:
            self._known[segment.slot] = chunks
            return None
        ids = np.concatenate(chunks)
        assert len(ids) == segment.start + len(segment.ids), f"slot {segment.slot} lacks chunks of its prompt"
        whole = replace(segment, ids=ids, start=0)
        hidden_TD: FloatArray = self._model.encode(torch.from_numpy(ids).long()).numpy()
        rows = self._hidden_pool.wanted_rows(whole)
        return self._hidden_pool.add(whole, hidden_TD[rows.start : rows.stop])
