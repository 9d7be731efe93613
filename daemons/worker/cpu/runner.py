"""Runs segments through a model on CPUs and samples their tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.steps.step import Admit, DispatchMode, Task, TokenLogprobs
from radixmesh.daemons.worker.collectives.agreement import agree_on_steps
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cpu.attention.backend import AttentionBackend, AttentionBatch, SlotArray
from radixmesh.daemons.worker.cpu.determinism import common_tiles
from radixmesh.daemons.worker.cpu.idle_batch import idle_batch
from radixmesh.daemons.worker.cpu.pooling import HiddenPool
from radixmesh.daemons.worker.cpu.sample_rows import input_after, masked_rows, sample_rows
from radixmesh.daemons.worker.cpu.tree_rows import Moves, accepted_rows, attention_parts, drafts_before, moves_of
from radixmesh.daemons.worker.cpu.two_batches import TwoBatches, halves
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch, LocalDispatch
from radixmesh.daemons.worker.host_memory.host_pool import ArrayHostPool
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.kv_pool import KvPool, kv_slots, rows_of_pages
from radixmesh.daemons.worker.models.experts import EXPERT_PROBE
from radixmesh.daemons.worker.models.model import HiddenStates, Model, ModelBatch
from radixmesh.daemons.worker.ranks.group import Group, LocalGroup
from radixmesh.daemons.worker.runner import DecodeRows, ModelRunner, SampleInput, Segment, SegmentOutput, StepOutput
from radixmesh.daemons.worker.sampling.logprobs import token_logprobs
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths
from radixmesh.daemons.worker.speculation.drafter import Drafter, DraftRow, trees_of
from radixmesh.daemons.worker.tiles import RowTiles

# Rows of logits that prompt logprobs hold at a time: a long chunk over a large vocabulary would take gigabytes.
_LOGPROB_ROWS = 128


class CpuRunner(ModelRunner):
    """With verified tiles and a batch-invariant attention, a row's bits depend on its own sequence alone."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        attention: AttentionBackend,
        tiles: RowTiles,
        hidden_pool: HiddenPool,
        *,
        max_total_len: int,
        num_threads: int,
        group: Group | None = None,
        experts: ExpertDispatch | None = None,
        two_batch_min_rows: int = 0,
    ) -> None:
        """two_batch_min_rows: steps in which a rank has so many rows run as two half batches; 0: none does."""
        self.page_size = pool.page_size
        self.num_pages = pool.num_pages
        self.kv_dtype, self.kv_layout = pool.dtype_name, pool.layout_name
        self.kv_token_bytes, self.kv_token_layout = pool.token_bytes, pool.token_layout_name
        self.kv_share = pool.share
        if group is not None and group.size > 1:
            # Pages of other ranks, or of other numbers of ranks, hold other heads, though they may lie alike.
            self.kv_is_whole = pool.is_whole
            self.kv_layout += f";tp={'*' if self.kv_is_whole else group.rank}/{group.size}"
        self.vocab_size = model.vocab_size
        self.max_total_len = max_total_len
        self.is_deterministic = attention.is_batch_invariant and tiles.sizes is not None
        self.tasks = model.tasks
        self.model = model
        self.pool = pool
        self._attention = attention
        self._group = group or LocalGroup()
        self.experts = experts or LocalDispatch()
        # Those of this rank; the group's are those that all its ranks have.
        self.own_tiles = self.tiles = tiles
        self._two_batch_min_rows, self._most_rows = two_batch_min_rows, 0
        self._two_batches: TwoBatches | None = None
        if two_batch_min_rows and isinstance(self.experts, AllToAllDispatch):
            self._two_batches = TwoBatches()
            self.experts.between = self._two_batches.pass_on
        self._hidden_pool = hidden_pool
        self._num_threads = num_threads
        self.drafter: Drafter | None = None
        self._lengths: DraftLengths | None = None
        self._chosen: RowLengths | None = None
        self.takes_grammars = True
        if self._group.size > 1:
            # All ranks compute the same rows: none may leave one out alone.
            self.mask_wait_s = None

    def verify(self, drafter: Drafter, *, max_drafts: int, lengths: DraftLengths | None = None) -> None:
        """From now on decodes compute up to `max_drafts` proposed tokens beside their last one, in one forward, and
        yield the proposals that sampling confirms and the token after them: the tokens of a runner without proposals.

        To be called before an executor is made of the runner. lengths: says how many each row drafts; None: as many as
        there may be. What a grammar forces is drafted in any case.
        """
        self.drafter, self._lengths = drafter, lengths
        self.max_tokens_per_row = 1 + max_drafts

    @torch.inference_mode()
    def formed(self) -> None:
        if self._group.size > 1:
            probes = self.model.row_probes()
            # Experts that are placed whole meet in no collectives, and are others on each rank.
            is_placed = self.experts.size > 1
            functions = [probe.function for probe in probes if not (is_placed and probe.name == EXPERT_PROBE)]
            self.tiles = common_tiles(self.own_tiles, functions, self._group)
        if isinstance(self.experts, AllToAllDispatch):
            agree_on_steps(self.experts.group, self._two_batch_min_rows, "--two-batch-min-rows")

    def admitted(self, admit: Admit) -> None:
        if self._lengths is not None:
            self._lengths.admitted(admit.slot, is_sampled=not admit.sampling.is_greedy)
        if self.drafter is not None:
            self.drafter.admitted(admit.slot)

    def set_dispatch_mode(
        self, dispatch: DispatchMode, max_tokens_per_rank: int, *, may_have_chunks: bool = False
    ) -> None:
        self.experts.set_dispatch_mode(dispatch, max_tokens_per_rank)
        self._most_rows = max_tokens_per_rank

    def step(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepOutput:
        before = self.experts.num_pairs
        output = super().step(rows, segments, ready_ns)
        if self._lengths is not None:
            self._observe(self._lengths, segments, output)
        if self.experts.size == 1:
            return output
        loads = self.expert_moves.take_loads() if self.expert_moves is not None else None
        return replace(output, expert_rows=self.experts.num_pairs - before, expert_loads=loads)

    def _observe(self, lengths: DraftLengths, segments: Sequence[Segment], output: StepOutput) -> None:
        decodes = [pair for pair in zip(segments, output.segments, strict=True) if pair[0].max_tokens is not None]
        if decodes:
            counts, drafted = np.array([(len(got.tokens), got.num_drafts) for _, got in decodes], np.int32).T
            times = (output.start_ns, output.end_ns) if len(decodes) == len(segments) else None
            slots = _slots([segment for segment, _ in decodes])
            lengths.observe(slots, counts, lengths.as_drafted(self._chosen, drafted), times, drafted)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        if not segments and self.experts.size == 1:
            return []
        if not segments:
            # Experts of this rank compute the rows of others.
            self._forward((), None)
            return []
        drafter = self.drafter
        if drafter is not None:
            began = time.perf_counter()
            segments = self._with_drafts(drafter, segments)
            self.draft_seconds += time.perf_counter() - began
        states = HiddenStates(drafter.hidden_layers) if drafter is not None and drafter.hidden_layers else None
        hidden_TD = self._forward(segments, states)
        if drafter is not None:
            num_rows = sum(len(segment.ids) for segment in segments)
            shown = () if states is None else (states.by_layer[layer][:num_rows] for layer in drafter.hidden_layers)
            began = time.perf_counter()
            drafter.computed(segments, tuple(shown))
            self.draft_seconds += time.perf_counter() - began
        tokens, logprobs = self._sample(segments, hidden_TD)
        vectors = {**self._pool_hidden(segments, hidden_TD), **self._score(segments, hidden_TD)}
        outputs, row = [], 0
        for index, segment in enumerate(segments):
            prompt_logprobs = None
            if segment.prompt_logprobs:
                prompt_logprobs = self._prompt_logprobs(segment, hidden_TD[row : row + len(segment.ids)])
            outputs.append(
                SegmentOutput(
                    token=tokens[index][0] if index in tokens else None,
                    more_tokens=tuple(tokens[index][1:]) if index in tokens else (),
                    num_drafts=0 if segment.max_tokens is None else len(segment.ids) - 1,
                    logprobs=logprobs.get(index),
                    prompt_logprobs=prompt_logprobs,
                    vector=vectors.get(index),
                )
            )
            row += len(segment.ids)
        return outputs

    def _forward(self, segments: Sequence[Segment], states: HiddenStates | None) -> torch.Tensor:
        """Rows as the segments have them, and padding behind. Alike on all ranks: the plan's header says how many rows
        any of them has at most."""
        if self._two_batches is None or self._most_rows < self._two_batch_min_rows:
            return self._half(segments, states)
        assert states is None, "ranks that share experts draft nothing"
        first, second = halves(segments)
        hidden = self._two_batches.run(partial(self._half, first), partial(self._half, second))
        counts = [sum(len(segment.ids) for segment in half) for half in (first, second)]
        return torch.cat([rows_TD[:count] for rows_TD, count in zip(hidden, counts, strict=True)])

    @torch.inference_mode()
    def _half(self, segments: Sequence[Segment], states: HiddenStates | None = None) -> torch.Tensor:
        # The number of threads is a property of the calling thread, and part of what fixes the bits.
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        batch = self.batch_of(segments, states) if segments else idle_batch(self.tiles, self.pool)
        return self.model.forward(batch)

    @torch.inference_mode()
    def logits(self, segments: Sequence[Segment]) -> list[FloatArray]:
        """As `forward` without sampling: the logits of every token, float32 [length, vocabulary] a segment."""
        hidden_TD = self.model.forward(self.batch_of(segments))
        rows = self._logits(hidden_TD, np.arange(sum(len(segment.ids) for segment in segments)))
        return np.split(rows, np.cumsum([len(segment.ids) for segment in segments])[:-1])

    @torch.inference_mode()
    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        self.pool.copy_page(source, target, num_tokens)
        if self.drafter is not None:
            self.drafter.copied(source, target, num_tokens)

    @torch.inference_mode()
    def read_kv(self, indexes: IntArray, part: KvShare | None = None) -> npt.NDArray[np.uint8]:
        return self.pool.read_tokens(torch.from_numpy(indexes), part).numpy()

    @torch.inference_mode()
    def write_kv(self, indexes: IntArray, data: npt.NDArray[np.uint8], part: KvShare | None = None) -> None:
        self.pool.write_tokens(torch.from_numpy(indexes), torch.from_numpy(data), part)
        if self.drafter is not None:
            self.drafter.received(indexes)

    def add_host_pool(self, num_bytes: int, segment: HostSegment | None = None) -> None:
        features = None if self.drafter is None else self.drafter.features
        beside_kv = () if features is None else (rows_of_pages(features, self.pool).numpy(),)
        planes = self.pool.page_planes()
        self.host_pool = ArrayHostPool(num_bytes, planes, self._loaded, segment, beside_kv=beside_kv)

    def _loaded(self, pages: IntArray) -> None:
        """KV came back into these pages, with a drafter's features of it."""
        if self.drafter is not None:
            size = self.page_size
            self.drafter.received(kv_slots(pages, len(pages) * size, size).astype(np.int32), has_features=True)

    @torch.inference_mode()
    def clear(self) -> None:
        self.pool.clear()
        if self.drafter is not None:
            self.drafter.cleared()

    def batch_of(self, segments: Sequence[Segment], hidden: HiddenStates | None = None) -> ModelBatch:
        num_rows = sum(len(segment.ids) for segment in segments)
        padded = self.tiles.padded(num_rows)
        ids, positions = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
        ids[:num_rows] = np.concatenate([segment.ids for segment in segments])
        parts = [part for segment in segments for part in attention_parts(segment, self.page_size)]
        positions[:num_rows] = np.concatenate([np.arange(part.start, part.start + part.length) for part in parts])
        return ModelBatch(
            ids_T=torch.from_numpy(ids),
            positions_T=torch.from_numpy(positions),
            num_rows=num_rows,
            kv_slots_N=torch.from_numpy(np.concatenate([part.kv_slots[part.start :] for part in parts])),
            kv=self.pool,
            attention=self._attention.begin(
                AttentionBatch(segments=parts, num_rows=padded, zero_slot=self.pool.zero_slot)
            ),
            tiles=self.tiles,
            hidden=hidden,
        )

    def _with_drafts(self, drafter: Drafter, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Decodes with the tokens that are proposed to follow their last one, and all other segments."""
        rows: dict[int, DraftRow] = {}
        decodes = [segment for segment in segments if segment.max_tokens is not None]
        most_of_rows = itertools.repeat(self.max_tokens_per_row - 1)
        if self._lengths is not None and decodes:
            self._chosen = self._lengths.choose(_slots(decodes), is_alone=len(decodes) == len(segments))
            most_of_rows = itertools.repeat(0) if self._chosen is None else iter(self._chosen.by_row.tolist())
        for index, segment in enumerate(segments):
            if segment.max_tokens is None:
                continue
            chosen = next(most_of_rows)
            if segment.sample is not None:
                # Texts that a grammar forces are drafted in any case.
                most = self.max_tokens_per_row - 1 if segment.sample.guide is not None else chosen
                most = min(segment.max_tokens - 1, most)
                if most > 0:
                    rows[index] = DraftRow(sample=segment.sample, most=most, slot=segment.slot, pages=segment.pages)
        drafted = list(segments)
        for index, tree in zip(rows, trees_of(drafter, list(rows.values()), self.vocab_size), strict=True):
            ids = np.concatenate((segments[index].ids, tree.ids))
            parents = segments[index].parents if tree.is_chain else tree.parents
            drafted[index] = replace(segments[index], ids=ids, parents=parents)
        return drafted

    def _sample(
        self, segments: Sequence[Segment], hidden_TD: torch.Tensor
    ) -> tuple[dict[int, list[int]], dict[int, TokenLogprobs]]:
        """Tokens and their logprobs by index of the segment.

        Each drafted position is sampled as if the drafts on its path were output, with its own noise; a draft is
        accepted if it is the token that was sampled where it follows.
        """
        ends = np.cumsum([len(segment.ids) for segment in segments])
        inputs: list[SampleInput] = []
        num_drafts: list[int] = []
        rows_of: dict[int, range] = {}
        chosen: list[int] = []
        for index, segment in enumerate(segments):
            if segment.sample is None:
                continue
            before = drafts_before(segment)
            rows_of[index] = range(len(inputs), len(inputs) + len(before))
            inputs += [input_after(segment.sample, drafts) for drafts in before]
            num_drafts += [len(drafts) for drafts in before]
            chosen += range(int(ends[index]) - len(before), int(ends[index]))
        if not inputs:
            return {}, {}
        rows = self._logits(hidden_TD, np.array(chosen, np.int64))
        masked, adjusted, single_rows, stuck_rows = masked_rows(rows, inputs, num_drafts)
        sampled = sample_rows(masked, adjusted, single_rows)
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        moves: list[Moves] = []
        for index, of_segment in rows_of.items():
            # Behind a row without any the next step fails the output; the token before is its last.
            is_stuck = [row in stuck_rows for row in of_segment]
            path = accepted_rows(segments[index], sampled[of_segment.start : of_segment.stop], is_stuck)
            moves.append(moves_of(segments[index], path, self.page_size))
            accepted = [of_segment[row] for row in path]
            tokens[index] = [sampled[row] for row in accepted]
            num_top = inputs[accepted[0]].sampling.num_top_logprobs
            if num_top is not None:
                logprobs[index] = token_logprobs(rows[accepted], tokens[index], num_top)
        self._move(moves)
        return tokens, logprobs

    def _move(self, moves: Sequence[Moves]) -> None:
        """KV of accepted drafts goes to where their positions lie."""
        sources, targets = (np.concatenate(of) for of in zip(*moves, strict=True))
        if len(sources):
            self.pool.move_tokens(torch.from_numpy(sources), torch.from_numpy(targets))
            assert self.drafter is not None
            self.drafter.moved(sources, targets)

    def _pool_hidden(self, segments: Sequence[Segment], hidden_TD: torch.Tensor) -> dict[int, FloatArray]:
        """Vectors of embed tasks that end in this step, by index of the segment."""
        wanted: list[tuple[int, SlotArray]] = []
        row = 0
        for index, segment in enumerate(segments):
            chosen = self._hidden_pool.wanted_rows(segment) if segment.task is Task.EMBED else range(0)
            if chosen:
                wanted.append((index, row + np.asarray(chosen, np.int64)))
            row += len(segment.ids)
        if not wanted:
            return {}
        rows = np.concatenate([rows for _, rows in wanted])
        padded = _padded_to(rows, self.tiles.padded(len(rows)))
        final = self.model.final_hidden(hidden_TD[torch.from_numpy(padded)], self.tiles).numpy()[: len(rows)]
        parts = np.split(final, np.cumsum([len(rows) for _, rows in wanted])[:-1])
        vectors = {
            index: self._hidden_pool.add(segments[index], part) for (index, _), part in zip(wanted, parts, strict=True)
        }
        return {index: vector for index, vector in vectors.items() if vector is not None}

    def _score(self, segments: Sequence[Segment], hidden_TD: torch.Tensor) -> dict[int, FloatArray]:
        """The scores, float32 [1] each, of score tasks that end in this step, by index of the segment."""
        last_rows = np.cumsum([len(segment.ids) for segment in segments]) - 1
        ending = [i for i, segment in enumerate(segments) if segment.task is Task.SCORE and segment.is_last_chunk]
        if not ending:
            return {}
        rows = _padded_to(last_rows[ending], self.tiles.padded(len(ending)))
        scores: FloatArray = self.model.scores(hidden_TD[torch.from_numpy(rows)], self.tiles).numpy()
        return {index: scores[row : row + 1].copy() for row, index in enumerate(ending)}

    def _prompt_logprobs(self, segment: Segment, hidden_LD: torch.Tensor) -> TokenLogprobs:
        """Of the prompt positions that the segment names; the row before a position predicts it."""
        assert segment.prompt_logprobs is not None
        positions = np.asarray(segment.prompt_logprobs)
        parts = []
        for first in range(0, len(positions), _LOGPROB_ROWS):
            chosen = positions[first : first + _LOGPROB_ROWS]
            rows = self._logits(hidden_LD, chosen - 1 - segment.start)
            parts.append(token_logprobs(rows, segment.prompt_ids[chosen].tolist(), segment.prompt_num_top))
        return TokenLogprobs(
            own=np.concatenate([part.own for part in parts]),
            num_top=parts[0].num_top,
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top=np.concatenate([part.top for part in parts]),
        )

    def _logits(self, hidden_TD: torch.Tensor, rows: SlotArray) -> FloatArray:
        """float32 [rows, vocabulary] of some rows of the forward's output."""
        padded = _padded_to(rows, self.tiles.padded(len(rows)))
        logits: FloatArray = self.model.logits(hidden_TD[torch.from_numpy(padded)], self.tiles).numpy()
        return logits[: len(rows)]


def _slots(segments: Sequence[Segment]) -> IntArray:
    return np.array([segment.slot for segment in segments], np.int32)


def _padded_to(rows: SlotArray, length: int) -> SlotArray:
    """`rows` and as many zeros as are missing."""
    padded = np.zeros(length, np.int64)
    padded[: len(rows)] = rows
    return padded
