"""Runs steps on a device: steps of decodes alone as captured graphs, steps with chunks through `prompt_steps.py`.

    launch   step inputs -> forward -> sample, tokens to the host -> event        nothing waits
    result   event is done -> tokens, times; logprobs from hidden states that were kept

Tokens never pass through the host on their way to the next step: a decode row reads the last token of its slot on the
device. Logprobs of sampled tokens are computed there too, in steps with a row that asks, and come with the tokens.
Those of prompt tokens are computed when the step's result is asked for, from hidden states that were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, DispatchMode, Task
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.collectives.agreement import agree_on_steps
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention
from radixmesh.daemons.worker.cuda.device import CudaDevice, Device, DeviceClock, TimedEvent
from radixmesh.daemons.worker.cuda.drafting.device_network import DeviceNetwork, NetworkDrafter
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.expert_moves import DeviceExpertMoves
from radixmesh.daemons.worker.cuda.kv_device import PoolDevice
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.cuda.ranks.peer_memory import CudaPeerMemory
from radixmesh.daemons.worker.cuda.step.chunk_steps import NO_CHUNKS, ChunkSteps, LaunchedChunks
from radixmesh.daemons.worker.cuda.step.compile_ahead import can_compile_ahead, compile_ahead
from radixmesh.daemons.worker.cuda.step.decode_steps import DecodeSteps, SecondHalf
from radixmesh.daemons.worker.cuda.step.host_logits import HostLogits
from radixmesh.daemons.worker.cuda.step.prompt_steps import PromptSteps, no_rows
from radixmesh.daemons.worker.cuda.step.prompt_vectors import PromptVectors
from radixmesh.daemons.worker.cuda.step.slot_chains import SlotChains
from radixmesh.daemons.worker.cuda.step.slot_masks import SlotMasks, yielded
from radixmesh.daemons.worker.cuda.step.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.token_ring import NOTHING, Fetched, TokenRing
from radixmesh.daemons.worker.cuda.step.verify_steps import NO_ROWS, VerifySteps
from radixmesh.daemons.worker.cuda.step.warm_up import warm_up_steps
from radixmesh.daemons.worker.guided.mask_memory import MaskSink
from radixmesh.daemons.worker.host_memory.host_pool import ArrayHostPool
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.kv_pool import KvPool, kv_slots
from radixmesh.daemons.worker.runner import (
    DecodeRows,
    ModelRunner,
    Segment,
    SegmentOutput,
    StepOutput,
)
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
from radixmesh.daemons.worker.speculation.drafter import Drafter
from radixmesh.daemons.worker.step_handle import StepHandle

_log = get_logger(__name__)

# Decode steps of the warm-up: the first ones of a device that was just started are slow.
_WARM_UP_DECODES = 100

# Flags that decide to how many rows a step is padded.
_STEP_FLAGS = (
    "--num-slots, --max-tokens-per-step, --max-total-len, --page-size, --dtype, --deterministic, --no-cuda-graphs, "
    "--tp-collectives, --ep-transport and --two-batch-min-rows"
)

AttentionCreator = Callable[[torch.Tensor], DeviceAttention]
"""Makes the attention over page tables int32 [slots + 1, pages] on the device, the last slot being a dummy."""
NetworkCreator = Callable[[SlotState], DeviceNetwork]
"""Makes the network that drafts for a model, over the slots of its runner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """num_slots: requests that hold a slot; max_tokens_per_step: rows of one step; graph_rows, prompt_rows: sizes of
    the steps of decodes, and of those with chunks, that are captured, ascending, none where nothing is.
    two_batch_min_rows: decodes with room for so many rows of a rank run as two halves; 0: none do."""

    num_slots: int
    max_tokens_per_step: int
    max_total_len: int
    graph_rows: tuple[int, ...]
    prompt_rows: tuple[int, ...] = ()
    two_batch_min_rows: int = 0


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
        the model together with this one. experts: carries rows to those that share its experts."""
        self.page_size = pool.page_size
        self.num_pages = pool.num_pages
        self.kv_dtype, self.kv_layout = pool.dtype_name, pool.layout_name
        self.kv_token_bytes, self.kv_token_layout = pool.token_bytes, pool.token_layout_name
        self.kv_share = pool.share
        self._group, self._experts = group, experts
        if group is not None:
            # Pages of other ranks, or of other numbers of ranks, hold other heads, though they may lie alike.
            self.kv_is_whole = pool.is_whole
            self.kv_layout += f";tp={'*' if self.kv_is_whole else group.rank}/{group.size}"
        self.vocab_size = model.vocab_size
        self.num_layers = model.num_layers
        self.tasks = model.tasks
        self.max_total_len = limits.max_total_len
        self.is_deterministic = is_deterministic
        self._limits = limits
        self._admissions = 0
        self.device = device
        self.model = model
        self.pool = pool
        # Plans may grant `Limits.max_pages_per_slot` at most. With a column less, the last page of one slot would
        # be written to the next one's table.
        max_pages = limits.max_total_len // pool.page_size + 1
        with device.in_order(), torch.inference_mode():
            self.slots = SlotState(device, num_slots=limits.num_slots, max_pages=max_pages, dummy_page=pool.num_pages)
            self._attention = create_attention(self.slots.page_tables)
            self._network = None if create_network is None else create_network(self.slots)
            # A mask may be late for one rank alone: its rows would yield nothing, and those of the others a token.
            self.takes_grammars = not self._attention.needs_exact_lengths and group is None
            self.masks = SlotMasks(
                device, num_slots=limits.num_slots, max_rows=limits.num_slots, vocab_size=self.vocab_size
            )
            self._create_sampler = partial(
                SlotSampler,
                limits.num_slots,
                vocab_size=self.vocab_size,
                max_total_len=limits.max_total_len,
                device=device.torch_device,
            )
            self._sampler = self._create_sampler(max_rows=limits.num_slots, masks=self.masks)
            self._prompts = PromptSteps(
                device,
                model,
                self._attention,
                self.slots,
                self.masks,
                page_size=pool.page_size,
                max_tokens=limits.max_tokens_per_step,
                max_total_len=limits.max_total_len,
                sizes=limits.prompt_rows,
                network=self._network,
            )
            self._tokens = TokenRing(device, max_rows=limits.num_slots)
            self._decodes = DecodeSteps(
                device,
                model,
                self._attention,
                self.slots,
                self.masks,
                self._tokens,
                page_size=pool.page_size,
                graph_rows=limits.graph_rows,
                use_pdl=use_pdl,
                experts=experts,
                second=self._second_half(create_attention, limits.two_batch_min_rows),
            )
            vectors = PromptVectors(device, model, embed_pooling)
            self._chunks = ChunkSteps(self._prompts, model, self.slots, self._tokens, vectors)
            self._clock = DeviceClock(device.record_event())
        if isinstance(device, CudaDevice) and pool.copies_by_address:
            memory = CudaPeerMemory("transfer_transport", "KV goes through the host's memory")
            self.kv_device = PoolDevice(device, pool, memory, self._received)
        self._host_logits = HostLogits(device, model)
        self._verify: VerifySteps | None = None
        self._chains: SlotChains | None = None

    def _second_half(self, create_attention: AttentionCreator, min_rows: int) -> SecondHalf | None:
        if not min_rows or self._experts is None:
            return None
        return SecondHalf(create_attention(self.slots.page_tables), min_rows)

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
        assert self._group is None and self._experts is None, "ranks do not draft together"
        if not self.can_verify:
            _log.warning("drafts_off", reason="the attention backend needs exact lengths on the host")
            return
        self.max_tokens_per_row = 1 + max_drafts
        max_rows = self._limits.num_slots * self.max_tokens_per_row
        with self.device.in_order(), torch.inference_mode():
            self._attention.reserve(max_rows)
            self.takes_grammars = max_forced is not None
            if max_forced is not None:
                self._chains = SlotChains(
                    self.device, self._limits.num_slots, max_rows, vocab_size=self.vocab_size, max_forced=max_forced
                )
            self._sampler = self._create_sampler(max_rows=max_rows, keeps_tokens=True, masks=self._chains)
            self._verify = VerifySteps(
                *(self.device, self.model, self._attention, self.slots, self._sampler),
                drafter,
                max_drafts=max_drafts,
                page_size=self.page_size,
                graph_rows=self._limits.graph_rows if graph_rows is None else graph_rows,
                lengths=lengths,
                chains=self._chains,
                kv_planes=self.pool.token_planes(),
            )
            self._verify.capture(self.model.dtype)
            self.device.record_event().wait()

    @property
    def network_drafter(self) -> Drafter:
        """Drafts by the network that the runner was made with."""
        assert self._network is not None, "no network was loaded"
        return NetworkDrafter(self._network)

    def formed(self) -> None:
        links = [link for link in (self._group, self._experts) if link is not None]
        for link in links:
            sizes = (self._limits, self.model.dtype, self.is_deterministic, self.page_size, link.kind)
            agree_on_steps(link.ranks, sizes, _STEP_FLAGS)
        with self.device.in_order(), torch.inference_mode():
            if any(link.is_captured_anew for link in links):
                self._prompts.drop()
                self._decodes.graphs.drop()
            for link in links:
                link.leave()
                link.form()
        if any(link.is_captured_anew for link in links):
            self.warm_up(is_compiled=True)
        if isinstance(self.expert_moves, DeviceExpertMoves):
            self.expert_moves.forget_picks()

    def set_dispatch_mode(
        self, dispatch: DispatchMode, max_tokens_per_rank: int, *, may_have_chunks: bool = False
    ) -> None:
        experts = self._experts
        if experts is None:
            return
        is_low_latency = dispatch is DispatchMode.LOW_LATENCY and 0 < max_tokens_per_rank <= experts.max_room
        # The same on all ranks: they have agreed on the sizes of graphs.
        room = self._decodes.graphs.bucket(max_tokens_per_rank) or max_tokens_per_rank
        experts.room = room if is_low_latency else 0
        if may_have_chunks and self._decodes.is_cut():
            # A rank with chunks runs them whole: rows of two halves and of a whole would meet in one collective.
            experts.room = 0

    def can_batch(self, sampling: Sampling) -> bool:
        return True

    def admitted(self, admit: Admit) -> None:
        self._admissions += 1
        self.slots.admitted(admit)
        self._sampler.admitted(admit)
        if self._verify is not None:
            self._verify.admitted(admit)

    def mask_sink(self, admit: Admit) -> MaskSink | None:
        return self.masks.sink(admit) if self._chains is None else self._chains.sink(admit)

    @property
    def can_verify(self) -> bool:
        """False where the attention needs exact lengths, which the host does not know while steps with drafts run."""
        return not self._attention.needs_exact_lengths

    def warm_up(self, *, has_decodes: bool = True, is_compiled: bool = False) -> None:
        """Compiles and captures, largest first: smaller graphs reuse its memory. Then runs prompts that no graph is
        for, and steps as they will come, so that no request waits for a compiler or a library's start.

        has_decodes: False before verify(), which captures the decodes itself: no others come. is_compiled: of another
        generation of the group; ranks that have met send each other what kernels have computed, and nothing else.
        """
        with self.device.in_order(), torch.inference_mode():
            if self.can_compile_ahead and not is_compiled:
                compile_ahead(self.launch_all)
            self._prompts.capture()
            self.set_dispatch_mode(DispatchMode.NORMAL, 0)
            if Task.GENERATE not in self.tasks:
                self._prompts.warm_up()
                self.device.record_event().wait()
                return
            if has_decodes:
                self._decodes.capture(self._sampler)
                self.set_dispatch_mode(DispatchMode.NORMAL, 0)
            self._prompts.warm_up()
            self._sampler.warm_up(self.model.dtype)
            for rows, segments in warm_up_steps(
                num_slots=self._limits.num_slots,
                max_prompt_len=self.max_total_len - 1,
                max_tokens_per_step=self._limits.max_tokens_per_step,
                num_decodes=_WARM_UP_DECODES if self.device.torch_device.type == "cuda" else 1,
            ):
                if has_decodes or segments:
                    mode = DispatchMode.NORMAL if segments else DispatchMode.LOW_LATENCY
                    self.set_dispatch_mode(mode, len(rows.slots))
                    self._launch(rows, segments)
            self.device.record_event().wait()

    @property
    def can_compile_ahead(self) -> bool:
        """True if the kernels of a warm-up are all Triton's, and can be compiled without being run."""
        return self.device.can_capture and self._attention.has_triton_alone and can_compile_ahead()

    def launch_all(self) -> None:
        """Launches the kernels of all steps that `warm_up` captures or runs, for compiling. Those of decodes always:
        nearly all of them are in steps that verify drafts too."""
        with self.device.in_order(), torch.inference_mode():
            self._prompts.launch_all()
            if Task.GENERATE in self.tasks:
                self._decodes.launch_all(self._sampler)
                self._sampler.warm_up(self.model.dtype)

    @torch.inference_mode()
    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        if self._group is not None:
            self._group.check()
        if self._experts is not None:
            self._experts.check()
        return self._launch(rows, segments)

    def _launch(self, rows: DecodeRows, segments: Sequence[Segment]) -> StepHandle[StepOutput]:
        # Not in_order(): entering and leaving a stream costs a tenth of a short step.
        self.device.stay_in_order()
        self._sampler.send()
        if self._network is not None:
            self._network.send()
        if self._verify is not None:
            return self._launch_verify(self._verify, rows, segments)
        if not segments:
            return self._launch_decodes(rows)
        slots = np.concatenate([rows.slots, np.array([s.slot for s in segments], np.int32)])
        self.slots.send(slots, rows.page_tables, rows.num_pages)
        return self._launch_chunks(rows, segments)

    def _launch_decodes(self, rows: DecodeRows) -> StepHandle[StepOutput]:
        if not len(rows.slots) and self._experts is None:
            # Rows there were, but none had room: kernels take no grids of nothing.
            start = self._clock.begin(self.device)
            return self._handle(start, start, StepHandle.of(NOTHING), rows.slots)
        start, end, fetched = self._decodes.launch(rows, self._sampler, self._clock, self._admissions)
        return self._handle(start, end, fetched, rows.slots)

    @torch.inference_mode()
    def logits(self, segments: Sequence[Segment]) -> list[FloatArray]:
        """The logits of every token of segments, float32 [length, vocabulary] each, for comparing: it waits for them.

        The segments' pages lie in the tables of their slots for that long: requests there have theirs sent anew.
        """
        with self.device.in_order():
            forward = self._chunks.forward_alone(segments)
            return np.split(self._host_logits.of(forward.hidden_TD), forward.chunk_ends[:-1])

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        raise AssertionError("a device runner is launched")

    def add_host_pool(self, num_bytes: int, segment: HostSegment | None = None) -> None:
        if isinstance(self.device, CudaDevice):
            # Triton is needed where there is a GPU alone.
            from radixmesh.daemons.worker.cuda.host_tier.host_pool import CudaHostPool

            words = self.pool.page_words()
            self.host_pool = CudaHostPool(self.device, words, num_bytes, self.num_pages, self._loaded, segment)
        else:
            self.host_pool = ArrayHostPool(num_bytes, self.pool.page_planes(), self._loaded, segment)

    @torch.inference_mode()
    def _loaded(self, pages: IntArray) -> None:
        """KV came into these pages that a network has not seen."""
        if self._network is not None:
            with self.device.in_order():
                tokens = kv_slots(pages, len(pages) * self.page_size, self.page_size)
                self._network.received(torch.from_numpy(tokens).to(self.device.torch_device))

    @torch.inference_mode()
    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        with self.device.in_order():
            self.pool.copy_page(source, target, num_tokens)
            if self._network is not None:
                self._network.copied(source, target, num_tokens)

    @torch.inference_mode()
    def read_kv(self, indexes: IntArray, part: KvShare | None = None) -> npt.NDArray[np.uint8]:
        # Behind the steps that were launched: the copy to the host waits for them, and for itself.
        with self.device.in_order():
            tokens = torch.from_numpy(indexes).to(self.device.torch_device)
            return self.pool.read_tokens(tokens, part).cpu().numpy()

    @torch.inference_mode()
    def write_kv(self, indexes: IntArray, data: npt.NDArray[np.uint8], part: KvShare | None = None) -> None:
        # From memory that is not pinned the copy to the device returns when the source may change.
        with self.device.in_order():
            tokens = torch.from_numpy(indexes).to(self.device.torch_device)
            self.pool.write_tokens(tokens, torch.from_numpy(data).to(self.device.torch_device), part)
            self._received(tokens)

    def _received(self, tokens: torch.Tensor) -> None:
        """KV of these tokens came from elsewhere: a network has not seen it."""
        if self._network is not None:
            self._network.received(tokens)

    @torch.inference_mode()
    def clear(self) -> None:
        with self.device.in_order():
            self.pool.clear()
            if self._network is not None:
                self._network.cleared()

    def _launch_chunks(self, rows: DecodeRows, segments: Sequence[Segment]) -> StepHandle[StepOutput]:
        """Launches a step with chunks, and samples all rows whose token is wanted."""
        start = self._clock.begin(self.device)
        chunks = self._chunks.launch(rows, segments, self._sampler, self._admissions)
        if self._group is not None:
            # Logits are gathered: by all ranks between the same two steps.
            chunks = chunks.with_prompt_logprobs(self._host_logits)
        end = self._clock.end(self.device)
        return self._handle(start, end, self._chunks.fetch(chunks, end), rows.slots, chunks)

    def _launch_verify(
        self, verify: VerifySteps, rows: DecodeRows, segments: Sequence[Segment]
    ) -> StepHandle[StepOutput]:
        """Launches a step whose decodes verify drafts. Chunks are a forward of their own, ahead of it."""
        start = self._clock.begin(self.device)
        chunks = NO_CHUNKS
        if segments:
            slots = np.array([segment.slot for segment in segments], np.int32)
            self.slots.send(slots, rows.page_tables, rows.num_pages)
            chunks = self._chunks.launch(no_rows(), segments, self._sampler, self._admissions)
        verifying = verify.launch(rows, is_alone=not segments) if len(rows.slots) else None
        end = self._clock.end(self.device)
        of_chunks = self._chunks.fetch(chunks, end)
        of_rows = StepHandle.of(NOTHING) if verifying is None else verify.fetch(verifying, end)

        def collect() -> StepOutput:
            end.wait()
            start_ns, end_ns = self._clock.place(start, end)
            got = NO_ROWS if verifying is None else verify.yielded(verifying, of_rows.result())
            if verifying is not None:
                verify.observe(verifying, got, None if segments else end_ns - start_ns)
            return StepOutput(
                tokens=got.tokens,
                counts=got.counts,
                num_drafts=got.num_drafts,
                segments=chunks.outputs(of_chunks.result(), self._host_logits),
                logprobs=got.logprobs,
                start_ns=start_ns,
                end_ns=end_ns,
            )

        return StepHandle(end, collect)

    def _handle(
        self,
        start: TimedEvent,
        end: TimedEvent,
        fetched: StepHandle[Fetched],
        slots: IntArray,
        chunks: LaunchedChunks = NO_CHUNKS,
    ) -> StepHandle[StepOutput]:
        """A step on the device, of decode rows of `slots`. The clock places steps in the order in which their results
        are asked for."""
        num_rows, is_guided = len(slots), self.masks.is_guided(slots)
        check_experts = None if self._experts is None else self._experts.launched(self.device)
        moves = self.expert_moves
        loads = moves.launched() if isinstance(moves, DeviceExpertMoves) else None

        def collect() -> StepOutput:
            end.wait()
            if self._group is not None:
                # Kernels that were told to leave have computed with parts of this rank alone.
                self._group.check()
            if check_experts is not None:
                check_experts()
            start_ns, end_ns = self._clock.place(start, end)
            got = fetched.result()
            tokens, counts = yielded(got.tokens[:num_rows]) if is_guided else (got.tokens[:num_rows], None)
            return StepOutput(
                tokens=tokens,
                counts=counts,
                segments=chunks.outputs(got, self._host_logits),
                logprobs={row: of for row, of in got.logprobs.items() if row < num_rows and got.tokens[row] >= 0},
                start_ns=start_ns,
                end_ns=end_ns,
                expert_loads=None if loads is None else loads(),
            )

        return StepHandle(end, collect, fetched.tokens if is_guided else None)
