"""Forwards of a runner's steps: decodes alone, chunks, and both. One attention, one set of page tables, one token ring.

Their graphs are captured together, largest first, so that smaller ones reuse the memory of larger ones, and they are
dropped together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixmesh.daemons.runtime.steps.step import DispatchMode, Task
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.drafting.device_network import DeviceNetwork
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.step.chunk_steps import ChunkSteps
from radixmesh.daemons.worker.cuda.step.decode_steps import DecodeSteps, SecondHalf
from radixmesh.daemons.worker.cuda.step.late_captures import LateCaptures
from radixmesh.daemons.worker.cuda.step.outputs.prompt_vectors import PromptVectors
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import TokenRing
from radixmesh.daemons.worker.cuda.step.prompt_steps import PromptSteps
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """num_slots: requests that hold a slot; max_tokens_per_step: rows of one step; graph_rows, prompt_rows: sizes of
    the steps of decodes, and of those with chunks, that are captured, ascending, none where nothing is.
    two_batch_min_rows: decodes with room for so many rows of a rank run as two halves; 0: none do. mask_processes: fill
    the masks of grammars; 0: threads of this process do."""

    num_slots: int
    max_tokens_per_step: int
    max_total_len: int
    graph_rows: tuple[int, ...]
    prompt_rows: tuple[int, ...] = ()
    two_batch_min_rows: int = 0
    mask_processes: int = 0


class StepForwards:
    """decodes: steps of decodes alone; chunks: those with chunks, which run through `prompts`."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        attention: DeviceAttention,
        slots: SlotState,
        masks: SlotMasks,
        limits: RunnerLimits,
        *,
        page_size: int,
        use_pdl: bool,
        embed_pooling: str,
        network: DeviceNetwork | None,
        experts: DeviceDispatch | None,
        second: SecondHalf | None,
    ) -> None:
        """Arguments as DeviceRunner's. second: of decodes that run as two halves."""
        self._model, self._experts, self._has_decodes = model, experts, Task.GENERATE in model.tasks
        self.late: LateCaptures | None = None
        """Graphs that ranks capture between steps; None: all of them are captured."""
        tokens = TokenRing(device, max_rows=limits.num_slots)
        self.prompts = PromptSteps(
            device,
            model,
            attention,
            slots,
            masks,
            page_size=page_size,
            max_tokens=limits.max_tokens_per_step,
            max_total_len=limits.max_total_len,
            sizes=limits.prompt_rows,
            network=network,
        )
        self.decodes = DecodeSteps(
            device,
            model,
            attention,
            slots,
            masks,
            tokens,
            page_size=page_size,
            graph_rows=limits.graph_rows,
            use_pdl=use_pdl,
            experts=experts,
            second=second,
        )
        self.chunks = ChunkSteps(self.prompts, model, slots, tokens, PromptVectors(device, model, embed_pooling))

    def launch_all(self, sampler: SlotSampler) -> None:
        """Launches the kernels of all steps that are captured or run in a warm-up, for compiling. Those of decodes
        always: nearly all of them are in steps that verify drafts too."""
        with self._model.each_kind_once():
            self.prompts.launch_all()
            if self._has_decodes:
                self.decodes.launch_all(sampler)

    def drop(self) -> None:
        """Forgets all graphs: they are captured anew."""
        self.prompts.drop()
        self.decodes.graphs.drop()
        self.late = None

    def capture_late(self) -> None:
        """Graphs of decodes are captured while requests are served, those of sizes that come. Others have none."""
        sizes = self.decodes.graphs.sizes
        self.late = LateCaptures(sizes) if sizes else None

    def set_dispatch_mode(
        self,
        dispatch: DispatchMode,
        max_tokens_per_rank: int,
        may_have_chunks: bool,
        capture: Callable[[int], None],
    ) -> None:
        """As ModelRunner's: the room of a rank in the next forward. capture: called for a graph of so many decodes that
        all ranks capture ahead of it."""
        experts = self._experts
        if experts is None:
            return
        is_low_latency = dispatch is DispatchMode.LOW_LATENCY and 0 < max_tokens_per_rank <= experts.max_room
        # A rank with chunks has no graph for them.
        self.decodes.may_replay = experts.mixes or not may_have_chunks
        # The same on all ranks: they have agreed on the sizes of graphs.
        size = self.decodes.graphs.bucket(max_tokens_per_rank)
        if self.late is not None and size is not None and is_low_latency and self.decodes.may_replay:
            size, is_new = self.late.choose(size)
            if is_new:
                capture(size)
        experts.room = (size or max_tokens_per_rank) if is_low_latency else 0
        if may_have_chunks and self.decodes.is_cut():
            # A rank with chunks runs them whole: rows of two halves and of a whole would meet in one collective.
            experts.room = 0
