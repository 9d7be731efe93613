"""A drafter that is a network: it follows what the target computes, in pages of its own, and drafts chains or trees.

    computed    features of the target's tokens are kept; of chunks the network computes its own KV as well
    propose     rows that the network lacks, up to the last token, which gives the first draft; then one row a draft of
                a chain, or the frontier of a tree, level by level, with KV in scratch pages behind the others

A token is *fresh* while the network's KV of it was computed from the tokens and features that the target has there. The
target's writes make tokens stale, the network's make them fresh. So its KV may lapse, for as long as drafts do not pay,
and is computed again from the features when they do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu.attention.backend import AttentionBackend, AttentionBatch, AttentionSegment, SlotArray
from radixmesh.daemons.worker.cpu.growing_tree import GrowingTree, ranked_rows
from radixmesh.daemons.worker.cpu.sample_rows import input_after, sample_rows
from radixmesh.daemons.worker.kv_pool import KvPool, kv_slots
from radixmesh.daemons.worker.models.model import ModelBatch
from radixmesh.daemons.worker.runner import SampleInput, Segment
from radixmesh.daemons.worker.speculation.draft_tree import DraftTree, TreeShape
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND, Drafter, DraftRow
from radixmesh.daemons.worker.speculation.models.draft_model import DraftModel
from radixmesh.daemons.worker.tiles import RowTiles

_SCRATCH_TOKENS = 2048


class _Part(NamedTuple):
    """Consecutive tokens of a sequence, from position `start` on. slots: numbers of all tokens up to the last one."""

    ids: IntArray
    start: int
    slots: SlotArray


class ModelDrafter(Drafter):
    """pool: as many pages as the target's, of the network's planes, and behind them `scratch_tokens()` for trees.
    dtype: of the features that are kept. shape: of the trees; None: chains."""

    def __init__(
        self,
        model: DraftModel,
        pool: KvPool,
        attention: AttentionBackend,
        dtype: torch.dtype,
        shape: TreeShape | None = None,
    ) -> None:
        self.hidden_layers = model.hidden_layers
        self.model, self._pool, self._attention = model, pool, attention
        self._shape = shape
        self._tiles = RowTiles(None)
        num_tokens = (pool.num_pages + 1) * pool.page_size
        self._features_SF = torch.zeros(num_tokens, model.num_features, dtype=dtype) if model.num_features else None
        self._is_fresh = np.zeros(num_tokens, np.bool_)
        # Of each slot, how many of its first tokens are known to be fresh: a row is not searched from its beginning.
        self._fresh_lens: defaultdict[int, int] = defaultdict(int)

    def admitted(self, slot: int) -> None:
        self._fresh_lens[slot] = 0

    @torch.inference_mode()
    def computed(self, segments: Sequence[Segment], hidden: tuple[torch.Tensor, ...]) -> None:
        slots = [self._slots(s.pages, s.start + len(s.ids)) for s in segments]
        written = np.concatenate([of[s.start :] for of, s in zip(slots, segments, strict=True)])
        self._is_fresh[written] = False
        if self._features_SF is not None:
            self._features_SF[torch.from_numpy(written)] = self.model.features(hidden)
        parts = []
        for segment, of in zip(segments, slots, strict=True):
            end = segment.start + len(segment.ids)
            fresh_len = self._fresh_lens[segment.slot] = min(self._fresh_len(segment.slot, of), segment.start)
            is_chunk = segment.max_tokens is None and segment.task is Task.GENERATE
            if is_chunk and fresh_len == segment.start and end <= self.model.max_total_len:
                parts.append(_Part(segment.ids, segment.start, of))
        self._compute([part for part in map(self._behind_first, parts) if len(part.ids)])

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        drafts = [empty_ints() for _ in rows]
        chosen, output = self._follow(rows)
        self._chain(rows, chosen, output, drafts)
        return drafts

    @torch.inference_mode()
    def propose_trees(self, rows: Sequence[DraftRow]) -> Sequence[DraftTree]:
        if self._shape is None:
            return super().propose_trees(rows)
        trees = [GrowingTree(self._shape.topk) for _ in rows]
        chosen, output = self._follow(rows)
        most = scratch_tokens(self._shape) // max(1, self._shape.tokens_per_row)
        for first in range(0, len(chosen), most):
            part = slice(first, first + most)
            self._grow(rows, chosen[part], output[part], trees)
        return [tree.best(row.most) for row, tree in zip(rows, trees, strict=True)]

    def _follow(self, rows: Sequence[DraftRow]) -> tuple[list[int], torch.Tensor]:
        """Computes what the network lacks of rows: the indexes of those that it has up to the last token now, and its
        output for these tokens."""
        parts: list[_Part] = []
        chosen: list[int] = []
        for index, row in enumerate(rows):
            length = row.sample.position
            slots = self._slots(row.pages, length + row.most)
            start = min(self._fresh_len(row.slot, slots[: length - 1]), length - 1)
            stop = min(length, start + 1 + MOST_BEHIND)
            if length > self.model.max_total_len or length <= self.model.first_position:
                continue
            parts.append(self._behind_first(_Part(_ids(row.sample, start, stop), start, slots[:stop])))
            self._fresh_lens[row.slot] = stop
            chosen.append(index)
        if not parts:
            return [], torch.empty(0)
        output = self._compute(parts)
        ends = np.cumsum([len(part.ids) for part in parts]) - 1
        reached = [number for number, index in enumerate(chosen) if _stop(parts[number]) == rows[index].sample.position]
        return [chosen[number] for number in reached], output[torch.from_numpy(ends[reached])]

    @torch.inference_mode()
    def moved(self, sources: SlotArray, targets: SlotArray) -> None:
        # The network's own KV of them is of a draft's features, and stale since they were computed.
        if self._features_SF is not None:
            self._features_SF[torch.from_numpy(targets)] = self._features_SF[torch.from_numpy(sources)]

    @torch.inference_mode()
    def copied(self, source: int, target: int, num_tokens: int) -> None:
        self._pool.copy_page(source, target, num_tokens)
        size = self._pool.page_size
        to, since = slice(target * size, target * size + num_tokens), slice(source * size, source * size + num_tokens)
        self._is_fresh[to] = self._is_fresh[since]
        if self._features_SF is not None:
            self._features_SF[to] = self._features_SF[since]

    @property
    def features(self) -> torch.Tensor | None:
        return self._features_SF

    @torch.inference_mode()
    def received(self, indexes: IntArray, *, has_features: bool = False) -> None:
        self._is_fresh[indexes] = False
        # Hidden states do not come from other workers: without this it would draft from those of an earlier request.
        if self._features_SF is not None and not has_features:
            self._features_SF[torch.from_numpy(indexes.astype(np.int64))] = 0

    @torch.inference_mode()
    def cleared(self) -> None:
        self._pool.clear()
        self._is_fresh[:] = False
        self._fresh_lens.clear()

    def _chain(self, rows: Sequence[DraftRow], chosen: list[int], output: torch.Tensor, drafts: list[IntArray]) -> None:
        """Drafts of the chosen rows. output: of the network for their last tokens."""
        while chosen:
            logits = self.model.logits(output).numpy()
            # With the noise of the position, by which the target samples too: drafts of sampled rows agree more often.
            inputs = [input_after(rows[index].sample, drafts[index]) for index in chosen]
            for index, token in zip(chosen, sample_rows(logits, inputs), strict=True):
                drafts[index] = np.append(drafts[index], np.int32(token))
            going = [number for number, index in enumerate(chosen) if self._has_room(rows[index], drafts[index])]
            features = output[going] if self._features_SF is not None else None
            chosen = [chosen[number] for number in going]
            parts = []
            for index in chosen:
                start = rows[index].sample.position + len(drafts[index]) - 1
                slots = self._slots(rows[index].pages, start + 1)
                # KV of a draft: the target has not been there yet.
                self._is_fresh[slots[-1]] = False
                parts.append(_Part(drafts[index][-1:], start, slots))
            if parts:
                output = self._forward(parts, features)

    def _grow(
        self, rows: Sequence[DraftRow], chosen: list[int], output: torch.Tensor, trees: Sequence[GrowingTree]
    ) -> None:
        """Grows the trees of the chosen rows. output: of the network for their last tokens."""
        assert self._shape is not None
        slots = {index: self._slots(rows[index].pages, rows[index].sample.position) for index in chosen}
        scratch = iter(range(self._pool.zero_slot - scratch_tokens(self._shape), self._pool.zero_slot))
        slot_of: dict[tuple[int, int], int] = {}
        nodes = [(index, 0) for index in chosen]
        for depth in range(1, self._shape.num_steps + 1):
            inputs = [
                input_after(rows[index].sample, trees[index].ids(trees[index].path(node))) for index, node in nodes
            ]
            ranked = ranked_rows(self.model.logits(output).numpy(), inputs, self._shape.topk)
            number_of = {node: number for number, node in enumerate(nodes)}
            for index in chosen:
                trees[index].grow([ranked[number_of[index, node]] for node in trees[index].frontier])
            chosen = [
                index
                for index in chosen
                if depth < self._shape.num_steps and self._may_go_on(rows[index], depth) and trees[index].frontier
            ]
            nodes = [(index, node) for index in chosen for node in trees[index].frontier]
            if not nodes:
                return
            slot_of |= dict(zip(nodes, scratch, strict=False))
            before = [number_of[index, trees[index].parent(node)] for index, node in nodes]
            parts = []
            for index, node in nodes:
                path = trees[index].path(node)
                own = np.array([slot_of[index, of] for of in path], np.int64)
                start = rows[index].sample.position + depth - 1
                parts.append(_Part(trees[index].ids([node]), start, np.concatenate((slots[index], own))))
            output = self._forward(parts, output[before] if self._features_SF is not None else None)

    def _may_go_on(self, row: DraftRow, num_drafts: int) -> bool:
        return num_drafts < row.most and row.sample.position + num_drafts <= self.model.max_total_len

    def _has_room(self, row: DraftRow, drafts: IntArray) -> bool:
        return self._may_go_on(row, len(drafts))

    def _fresh_len(self, slot: int, slots: SlotArray) -> int:
        """Number of a sequence's first tokens that are fresh, as far as `slots` go. The first one has no row where rows
        have features."""
        start = max(self._fresh_lens[slot], self.model.first_position)
        is_fresh = self._is_fresh[slots[start:]]
        return min(start + (len(is_fresh) if is_fresh.all() else int(is_fresh.argmin())), len(slots))

    def _behind_first(self, part: _Part) -> _Part:
        skipped = max(0, self.model.first_position - part.start)
        return _Part(part.ids[skipped:], part.start + skipped, part.slots)

    def _compute(self, parts: Sequence[_Part]) -> torch.Tensor:
        """Rows from the target's tokens and features, [sum of rows, *]."""
        if not parts:
            return torch.empty(0)
        features = None
        if self._features_SF is not None:
            before = np.concatenate([part.slots[part.start - 1 : _stop(part) - 1] for part in parts])
            features = self._features_SF[torch.from_numpy(before)]
        output = self._forward(parts, features)
        for part in parts:
            self._is_fresh[part.slots[part.start :]] = True
        return output

    def _forward(self, parts: Sequence[_Part], features_TF: torch.Tensor | None) -> torch.Tensor:
        first = self.model.first_position
        num_rows = sum(len(part.ids) for part in parts)
        positions = np.concatenate([np.arange(part.start, _stop(part)) - first for part in parts])
        segments = [
            AttentionSegment(start=part.start - first, length=len(part.ids), kv_slots=part.slots[first:])
            for part in parts
        ]
        batch = ModelBatch(
            ids_T=torch.from_numpy(np.concatenate([part.ids for part in parts]).astype(np.int64)),
            positions_T=torch.from_numpy(positions),
            num_rows=num_rows,
            kv_slots_N=torch.from_numpy(np.concatenate([part.slots[part.start :] for part in parts])),
            kv=self._pool,
            attention=self._attention.begin(
                AttentionBatch(segments=segments, num_rows=num_rows, zero_slot=self._pool.zero_slot)
            ),
            tiles=self._tiles,
        )
        return self.model.forward(batch, features_TF)

    def _slots(self, pages: IntArray, length: int) -> SlotArray:
        return kv_slots(pages, length, self._pool.page_size)


def scratch_tokens(shape: TreeShape) -> int:
    """Tokens of the network's pool for trees: those of some rows at a time."""
    return max(_SCRATCH_TOKENS, shape.tokens_per_row)


def _stop(part: _Part) -> int:
    return part.start + len(part.ids)


def _ids(sample: SampleInput, start: int, stop: int) -> IntArray:
    """Tokens of prompt and output at positions [start, stop)."""
    num_prompt = len(sample.prompt_ids)
    of_output = sample.output_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]
    return np.concatenate((sample.prompt_ids[start:stop], of_output))
