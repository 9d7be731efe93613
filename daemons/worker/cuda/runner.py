"""Runs steps on a device: steps of decodes alone as captured graphs, steps with chunks through `prompt_steps.py`.

    launch   step inputs -> forward -> sample, tokens to the host -> event        nothing waits
    result   event is done -> tokens, times; logprobs from hidden states that were kept

Tokens never pass through the host on their way to the next step: a decode row reads the last token of its slot on the
device. Logprobs of sampled tokens are computed there too, in steps with a row that asks, and come with the tokens.
Those of prompt tokens are computed when the step's result is asked for, from hidden states that were kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, DispatchMode, Task
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.attention.backend import AttentionCreator
from radixmesh.daemons.worker.cuda.device import Device, DeviceClock
from radixmesh.daemons.worker.cuda.drafting.device_network import NetworkCreator, NetworkDrafter
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.expert_moves import DeviceExpertMoves
from radixmesh.daemons.worker.cuda.kv_access import KvAccess
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.cuda.ranks.rank_links import RankLinks
from radixmesh.daemons.worker.cuda.step.chunk_steps import NO_CHUNKS
from radixmesh.daemons.worker.cuda.step.decode_steps import SecondHalf
from radixmesh.daemons.worker.cuda.step.outputs.host_logits import HostLogits
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import NOTHING
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.cuda.step.sampling.slot_chains import SlotChains
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.step_forwards import RunnerLimits, StepForwards
from radixmesh.daemons.worker.cuda.step.step_results import StepResults
from radixmesh.daemons.worker.cuda.step.verify_steps import VerifySteps
from radixmesh.daemons.worker.cuda.step.warm_up.compile_ahead import can_compile_ahead, compile_ahead
from radixmesh.daemons.worker.cuda.step.warm_up.warm_up_steps import warm_up_steps
from radixmesh.daemons.worker.guided.mask_memory import MaskSink
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.runner import DecodeRows, ModelRunner, Segment, SegmentOutput, StepOutput
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
from radixmesh.daemons.worker.speculation.drafter import Drafter
from radixmesh.daemons.worker.step_handle import StepHandle

_log = get_logger(__name__)

# Decode steps of the warm-up: the first ones of a device that was just started are slow.
_WARM_UP_DECODES = 100


class DeviceRunner(ModelRunner):
    """One thread calls it; steps overlap with that thread's work and run in the order of their launches."""

    is_asynchronous = True
    suppresses_rows = True
    mask_wait_s = 0.002

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        pool: KvPool,
        create_attention: AttentionCreator,
        limits: RunnerLimits,
        *,
        is_deterministic: bool,
        use_pdl: bool,
        embed_pooling: str = "mean",
        create_network: NetworkCreator | None = None,
        group: DeviceGroup | None = None,
        experts: DeviceDispatch | None = None,
    ) -> None:
        """create_network: of a model that a network drafts for: `verify(runner.network_drafter)`. use_pdl: kernels at a
        step's beginning and end may begin before those ahead of them have ended (Hopper). group: the ranks that hold
        the model together with this one. experts: reaches those that share its experts."""
        self._describe(model, pool, limits, is_deterministic=is_deterministic, group=group)
        self._limits, self._use_pdl = limits, use_pdl
        self._admissions = 0
        self.device = device
        self.model = model
        self.pool = pool
        self.links = links = RankLinks(group, experts)
        # Plans may grant `Limits.max_pages_per_slot` at most. With a column less, the last page of one slot would
        # be written to the next one's table.
        max_pages = limits.max_total_len // pool.page_size + 1
        with device.in_order(), torch.inference_mode():
            self.slots = SlotState(device, num_slots=limits.num_slots, max_pages=max_pages, dummy_page=pool.num_pages)
            self.attention = create_attention(self.slots.page_tables)
            self._network = None if create_network is None else create_network(self.slots)
            # A mask may be late for one rank alone: its rows would yield nothing, and those of the others a token.
            self.takes_grammars = not self.attention.needs_exact_lengths and group is None
            self.masks = SlotMasks(
                device,
                num_slots=limits.num_slots,
                max_rows=limits.num_slots,
                vocab_size=self.vocab_size,
                num_processes=limits.mask_processes if self.takes_grammars else 0,
            )
            self._create_sampler = partial(
                SlotSampler,
                limits.num_slots,
                vocab_size=self.vocab_size,
                max_total_len=limits.max_total_len,
                device=device,
            )
            self._sampler = self._create_sampler(max_rows=limits.num_slots, masks=self.masks)
            is_cut = bool(limits.two_batch_min_rows) and links.travels is not None
            second = create_attention(self.slots.page_tables) if is_cut else None
            self.forwards = StepForwards(
                *(device, model, self.attention, self.slots, self.masks, limits),
                page_size=pool.page_size,
                use_pdl=use_pdl,
                embed_pooling=embed_pooling,
                network=self._network,
                experts=links.travels,
                second=None if second is None else SecondHalf(second, limits.two_batch_min_rows),
            )
            self._clock = DeviceClock(device.record_event())
        self._host_logits = HostLogits(device, model)
        self._results = StepResults(device, self._clock, self.masks, self._host_logits, links)
        self._kv = KvAccess(device, pool, self._network)
        self.kv_device = self._kv.create_device()
        self.verifying: VerifySteps | None = None
        self._chains: SlotChains | None = None

    def _describe(
        self,
        model: DeviceModel,
        pool: KvPool,
        limits: RunnerLimits,
        *,
        is_deterministic: bool,
        group: DeviceGroup | None,
    ) -> None:
        """The facts that a ModelRunner tells of itself."""
        self.page_size = pool.page_size
        self.num_pages = pool.num_pages
        self.kv_dtype, self.kv_layout = pool.dtype_name, pool.layout_name
        self.kv_token_bytes, self.kv_token_layout = pool.token_bytes, pool.token_layout_name
        self.kv_share = pool.share
        if group is not None:
            # Pages of other ranks, or of other numbers of ranks, hold other heads, though they may lie alike.
            self.kv_is_whole = pool.is_whole
            self.kv_layout += f";tp={'*' if self.kv_is_whole else group.rank}/{group.size}"
        self.vocab_size = model.vocab_size
        self.num_layers = model.num_layers
        self.tasks = model.tasks
        self.max_total_len = limits.max_total_len
        self.is_deterministic = is_deterministic

    def verify(
        self,
        drafter: Drafter,
        *,
        max_drafts: int,
        graph_rows: tuple[int, ...] | None = None,
        lengths: DraftLengths | None = None,
        max_forced: int | None = None,
    ) -> None:
        """From now on decodes compute up to `max_drafts` proposed tokens beside their last one, as `CpuRunner.verify`.

        To be called before an executor is made of the runner. graph_rows: sizes of the steps that are captured; None:
        those of the runner's limits. lengths: says which steps draft; None: all do. max_forced: rows may follow
        grammars, and draft up to so many ids of what these force; `drafter` drafts on the device then, or nothing.
        Attention that needs exact lengths verifies nothing.
        """
        assert not self.links, "ranks do not draft together"
        if not self.can_verify:
            _log.warning("drafts_off", reason="the attention backend needs exact lengths on the host")
            return
        self.max_tokens_per_row = 1 + max_drafts
        max_rows = self._limits.num_slots * self.max_tokens_per_row
        with self.device.in_order(), torch.inference_mode():
            self.attention.reserve(max_rows)
            self.takes_grammars = max_forced is not None
            if max_forced is not None:
                self._chains = SlotChains(
                    self.device,
                    self._limits.num_slots,
                    max_rows,
                    vocab_size=self.vocab_size,
                    max_drafts=max_forced,
                    num_processes=self._limits.mask_processes,
                )
            self._sampler = self._create_sampler(max_rows=max_rows, keeps_tokens=True, masks=self._chains)
            self.verifying = VerifySteps(
                *(self.device, self.model, self.attention, self.slots, self._sampler),
                drafter,
                max_drafts=max_drafts,
                page_size=self.page_size,
                graph_rows=self._limits.graph_rows if graph_rows is None else graph_rows,
                use_pdl=self._use_pdl,
                lengths=lengths,
                chains=self._chains,
                kv_planes=self.pool.token_planes(),
            )
            self.verifying.capture(self.model.dtype)
            self.device.record_event().wait()

    @property
    def network_drafter(self) -> Drafter:
        """Drafts by the network that the runner was made with."""
        assert self._network is not None, "no network was loaded"
        return NetworkDrafter(self._network)

    def formed(self) -> None:
        started = time.monotonic()
        is_again = self.links.agree(self._limits, self.model.dtype, self.is_deterministic, self.page_size)
        with self.device.in_order(), torch.inference_mode():
            if self.links.is_captured_anew:
                self.forwards.drop()
            self.links.form()
        connected = time.monotonic()
        if self.links.is_captured_anew:
            if is_again and self.links.travels is not None:
                # Requests wait.
                self.forwards.capture_late()
            else:
                self.warm_up(is_formed=True)
        if self._moves is not None:
            self._moves.forget_picks()
        captured = time.monotonic()
        _log.info("ranks_connected", seconds=round(connected - started, 3), captures_s=round(captured - connected, 3))

    def set_dispatch_mode(
        self, dispatch: DispatchMode, max_tokens_per_rank: int, *, may_have_chunks: bool = False
    ) -> None:
        self.forwards.set_dispatch_mode(dispatch, max_tokens_per_rank, may_have_chunks, self._capture)

    def _capture(self, num_rows: int) -> None:
        """Captures decodes of one size between two steps, as all ranks do. Raises CollectiveAborted or RankLost."""
        self.links.check()
        started = time.monotonic()
        with self.device.in_order(), torch.inference_mode(), self.links.losses_told():
            # No event says when the staging slots that it takes are free again.
            self.device.record_event().wait()
            self.forwards.decodes.capture(self._sampler, (num_rows,))
            self.device.record_event().wait()
        _log.info("graph_captured", rows=num_rows, seconds=round(time.monotonic() - started, 3))

    def can_batch(self, sampling: Sampling) -> bool:
        return True

    def admitted(self, admit: Admit) -> None:
        self._admissions += 1
        self.slots.admitted(admit)
        self._sampler.admitted(admit)
        if self.verifying is not None:
            self.verifying.admitted(admit)

    def mask_sink(self, admit: Admit) -> MaskSink | None:
        return self.mask_memory.sink(admit)

    @property
    def mask_memory(self) -> SlotMasks | SlotChains:
        """Masks of the outputs that follow grammars: chains of them once steps verify drafts."""
        return self.masks if self._chains is None else self._chains

    @property
    def can_verify(self) -> bool:
        """False where the attention needs exact lengths, which the host does not know while steps with drafts run."""
        return not self.attention.needs_exact_lengths

    def warm_up(self, *, has_decodes: bool = True, is_formed: bool = False) -> None:
        """Compiles and captures, largest first: smaller graphs reuse its memory. Then runs prompts that no graph is
        for, and steps as they will come, so that no request waits for a compiler or a library's start.

        has_decodes: False before verify(), which captures the decodes itself: no others come. is_formed: the ranks have
        met, after a warm-up of each alone; graphs that hold their connections are captured then and not before. What
        they send each other is what kernels have computed, and nothing else.
        """
        is_recorded = is_formed or not self.links.is_captured_anew
        with self.device.in_order(), torch.inference_mode():
            if self.can_compile_ahead and not is_formed:
                compile_ahead(self.launch_all)
            self.forwards.prompts.capture(is_recorded=is_recorded)
            self.set_dispatch_mode(DispatchMode.NORMAL, 0)
            if Task.GENERATE not in self.tasks:
                self.forwards.prompts.warm_up()
                self.device.record_event().wait()
                return
            if has_decodes:
                self.forwards.decodes.capture(self._sampler, is_recorded=is_recorded)
                self.set_dispatch_mode(DispatchMode.NORMAL, 0)
            self.forwards.prompts.warm_up()
            self._sampler.warm_up(self.model.dtype)
            for rows, segments in warm_up_steps(
                num_slots=self._limits.num_slots,
                max_prompt_len=self.max_total_len - 1,
                max_tokens_per_step=self._limits.max_tokens_per_step,
                num_decodes=_WARM_UP_DECODES if self.device.torch_device.type == "cuda" and is_recorded else 1,
            ):
                if has_decodes or segments:
                    mode = DispatchMode.NORMAL if segments else DispatchMode.LOW_LATENCY
                    self.set_dispatch_mode(mode, len(rows.slots))
                    self._launch(rows, segments)
            self.device.record_event().wait()

    @property
    def can_compile_ahead(self) -> bool:
        """True if the kernels of a warm-up are all Triton's, and can be compiled without being run."""
        return self.device.can_capture and self.attention.has_triton_alone and can_compile_ahead()

    def launch_all(self) -> None:
        """Launches the kernels of all steps that `warm_up` captures or runs, for compiling. Those of decodes always:
        nearly all of them are in steps that verify drafts too."""
        with self.device.in_order(), torch.inference_mode():
            self.forwards.launch_all(self._sampler)
            if Task.GENERATE in self.tasks:
                self._sampler.warm_up(self.model.dtype)

    @torch.inference_mode()
    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        self.links.check()
        return self._launch(rows, segments)

    def _launch(self, rows: DecodeRows, segments: Sequence[Segment]) -> StepHandle[StepOutput]:
        # Not in_order(): entering and leaving a stream costs a tenth of a short step.
        self.device.stay_in_order()
        self._sampler.send()
        if self._network is not None:
            self._network.send()
        if self.verifying is not None:
            return self._launch_verify(self.verifying, rows, segments)
        if not segments:
            return self._launch_decodes(rows)
        if self._may_decode(rows, segments):
            return self._launch_as_decodes(rows, segments)
        self.slots.send(_slots_of(rows, segments), rows.page_tables, rows.num_pages)
        return self._launch_chunks(rows, segments)

    def _launch_decodes(self, rows: DecodeRows) -> StepHandle[StepOutput]:
        if not len(rows.slots) and self.links.travels is None:
            # Rows there were, but none had room: kernels take no grids of nothing.
            start = self._clock.begin(self.device)
            return self._results.handle(start, start, StepHandle.of(NOTHING), rows.slots, moves=self._moves)
        start, end, fetched = self.forwards.decodes.launch(rows, self._sampler, self._clock, self._admissions)
        return self._results.handle(start, end, fetched, rows.slots, moves=self._moves)

    def _may_decode(self, rows: DecodeRows, segments: Sequence[Segment]) -> bool:
        """True if chunks can go as rows of decodes: prompts of which all but the last token was there, as of outputs
        whose KV has come from elsewhere. That takes the graph of a step without them, and no sampling beside it."""
        if self._network is not None or self.links.travels is not None:
            return False
        are_tokens = all(
            len(segment.ids) == 1 and segment.sample is not None and segment.prompt_logprobs is None
            for segment in segments
        )
        return are_tokens and not self.masks.is_guided(_slots_of(rows, segments))

    def _launch_as_decodes(self, rows: DecodeRows, segments: Sequence[Segment]) -> StepHandle[StepOutput]:
        """Launches a step whose chunks are one token each, and sampled."""
        handle, num_rows = self._launch_decodes(_with_rows(rows, segments)), len(rows.slots)

        def collect() -> StepOutput:
            output = handle.result()
            of_segments = [
                SegmentOutput(token=int(token), logprobs=output.logprobs.get(num_rows + index))
                for index, token in enumerate(output.tokens[num_rows:].tolist())
            ]
            logprobs = {row: of for row, of in output.logprobs.items() if row < num_rows}
            return replace(output, tokens=output.tokens[:num_rows], segments=of_segments, logprobs=logprobs)

        return StepHandle(handle.event, collect)

    def _launch_chunks(self, rows: DecodeRows, segments: Sequence[Segment]) -> StepHandle[StepOutput]:
        """Launches a step with chunks, and samples all rows whose token is wanted."""
        start, chunk_steps = self._clock.begin(self.device), self.forwards.chunks
        chunks = chunk_steps.launch(rows, segments, self._sampler, self._admissions)
        if self.links.group is not None:
            # Logits are gathered: by all ranks between the same two steps.
            chunks = chunks.with_prompt_logprobs(self._host_logits)
        end = self._clock.end(self.device)
        return self._results.handle(start, end, chunk_steps.fetch(chunks, end), rows.slots, chunks, self._moves)

    def _launch_verify(
        self, verify: VerifySteps, rows: DecodeRows, segments: Sequence[Segment]
    ) -> StepHandle[StepOutput]:
        """Launches a step whose decodes verify drafts. Chunks are a forward of their own, ahead of it."""
        start, chunk_steps = self._clock.begin(self.device), self.forwards.chunks
        chunks = NO_CHUNKS
        if segments:
            slots = np.array([segment.slot for segment in segments], np.int32)
            self.slots.send(slots, rows.page_tables, rows.num_pages)
            chunks = chunk_steps.launch(no_rows(), segments, self._sampler, self._admissions)
        verifying = verify.launch(rows, is_alone=not segments) if len(rows.slots) else None
        end = self._clock.end(self.device)
        of_chunks = chunk_steps.fetch(chunks, end)
        is_followed = False
        if self._chains is not None and self._chains.descriptor >= 0:
            # Threads of this process would want the interpreter's lock while the step thread settles the step.
            sampled = [segments[index].slot for index in chunks.sampled]
            is_followed = self._chains.is_guided(np.concatenate([rows.slots, np.array(sampled, np.int32)]))
        return self._results.handle_verified(start, end, verify, verifying, of_chunks, chunks, is_followed=is_followed)

    @property
    def _moves(self) -> DeviceExpertMoves | None:
        return self.expert_moves if isinstance(self.expert_moves, DeviceExpertMoves) else None

    @torch.inference_mode()
    def logits(self, segments: Sequence[Segment]) -> list[FloatArray]:
        """The logits of every token of segments, float32 [length, vocabulary] each, for comparing: it waits for them.

        The segments' pages lie in the tables of their slots for that long: requests there have theirs sent anew.
        """
        with self.device.in_order():
            forward = self.forwards.chunks.forward_alone(segments)
            return np.split(self._host_logits.of(forward.hidden_TD), forward.chunk_ends[:-1])

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        raise AssertionError("a device runner is launched")

    def add_host_pool(self, num_bytes: int, segment: HostSegment | None = None) -> None:
        self.host_pool = self._kv.create_host_pool(num_bytes, segment)

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        self._kv.copy_page(source, target, num_tokens)

    def read_kv(self, indexes: IntArray, part: KvShare | None = None) -> npt.NDArray[np.uint8]:
        return self._kv.read(indexes, part)

    def write_kv(self, indexes: IntArray, data: npt.NDArray[np.uint8], part: KvShare | None = None) -> None:
        self._kv.write(indexes, data, part)

    def clear(self) -> None:
        self._kv.clear()


def _with_rows(rows: DecodeRows, segments: Sequence[Segment]) -> DecodeRows:
    """Rows of decodes with those of chunks of one token behind them."""
    sampling = [segment.sample.sampling for segment in segments if segment.sample is not None]
    return replace(
        rows,
        slots=_slots_of(rows, segments),
        ids=np.concatenate([rows.ids, *(segment.ids for segment in segments)]),
        positions=np.concatenate([rows.positions, np.array([segment.start for segment in segments], np.int32)]),
        seeds=np.concatenate([rows.seeds, np.array([one.seed or 0 for one in sampling], np.uint64)]),
        is_sampled=np.concatenate([rows.is_sampled, np.array([not one.is_greedy for one in sampling], np.bool_)]),
        is_repeat=False,
    )


def _slots_of(rows: DecodeRows, segments: Sequence[Segment]) -> IntArray:
    return np.concatenate([rows.slots, np.array([segment.slot for segment in segments], np.int32)])
