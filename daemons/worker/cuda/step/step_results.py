"""Results of steps: from what was launched to a StepOutput, once the device has come to its end.

Results are asked for in the order of the launches: the clock places each step behind the one before it.
"""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import Device, DeviceClock, TimedEvent
from radixmesh.daemons.worker.cuda.expert_parallel.expert_moves import DeviceExpertMoves
from radixmesh.daemons.worker.cuda.ranks.rank_links import RankLinks
from radixmesh.daemons.worker.cuda.step.chunk_steps import NO_CHUNKS, LaunchedChunks
from radixmesh.daemons.worker.cuda.step.outputs.host_logits import HostLogits
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import NOTHING, Fetched
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks, yielded
from radixmesh.daemons.worker.cuda.step.verify_steps import NO_ROWS, Verifying, VerifySteps
from radixmesh.daemons.worker.runner import StepOutput
from radixmesh.daemons.worker.step_handle import StepHandle


class StepResults:
    """Times by `clock`. links: other ranks, without which a step's output is not believed."""

    def __init__(
        self, device: Device, clock: DeviceClock, masks: SlotMasks, host_logits: HostLogits, links: RankLinks
    ) -> None:
        self._device, self._clock, self._masks = device, clock, masks
        self._host_logits, self._links = host_logits, links

    def handle(
        self,
        start: TimedEvent,
        end: TimedEvent,
        fetched: StepHandle[Fetched],
        slots: IntArray,
        chunks: LaunchedChunks = NO_CHUNKS,
        moves: DeviceExpertMoves | None = None,
    ) -> StepHandle[StepOutput]:
        """A step of decode rows of `slots`, then of chunks. moves: counts what its rows picked."""
        num_rows, is_guided = len(slots), self._masks.is_guided(slots)
        check = self._links.launched(self._device)
        loads = None if moves is None else moves.launched()

        def collect() -> StepOutput:
            end.wait()
            check()
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

    def handle_verified(
        self,
        start: TimedEvent,
        end: TimedEvent,
        verify: VerifySteps,
        verifying: Verifying | None,
        of_chunks: StepHandle[Fetched],
        chunks: LaunchedChunks,
        *,
        is_followed: bool,
    ) -> StepHandle[StepOutput]:
        """A step whose decodes verify drafts; verifying: None where it has chunks alone. is_followed: processes move
        outputs of its rows, or of chunks that are sampled, on through their grammars."""
        of_rows = StepHandle.of(NOTHING) if verifying is None else verify.fetch(verifying, end)

        def collect() -> StepOutput:
            end.wait()
            start_ns, end_ns = self._clock.place(start, end)
            got = NO_ROWS if verifying is None else verify.yielded(verifying, of_rows.result())
            if verifying is not None:
                verify.observe(verifying, got, None if chunks.num_segments else (start_ns, end_ns))
            return StepOutput(
                tokens=got.tokens,
                counts=got.counts,
                num_drafts=got.num_drafts,
                segments=chunks.outputs(of_chunks.result(), self._host_logits) if chunks.num_segments else [],
                logprobs=got.logprobs,
                start_ns=start_ns,
                end_ns=end_ns,
            )

        def tokens() -> IntArray:
            rows = np.zeros((0, 1), np.int32)
            if verifying is not None and of_rows.tokens is not None:
                rows = verify.tokens_of(verifying, of_rows.tokens())
            if of_chunks.tokens is None:
                return rows
            sampled = of_chunks.tokens()
            padded = np.full((len(sampled), rows.shape[1]), -1, np.int32)
            padded[:, 0] = sampled
            return np.concatenate([rows, padded])

        return StepHandle(end, collect, tokens if is_followed else None)
