"""A step that was launched on a device: when it is over, what came of it, what is still to be drawn on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.worker.cuda.device import DeviceClock, Mark
from radixmesh.daemons.worker.cuda.step.host_logits import CarefulSegment, HostLogits
from radixmesh.daemons.worker.cuda.step.token_ring import FetchedTokens
from radixmesh.daemons.worker.runner import RunningStep, SegmentOutput, StepOutput


class RunningDeviceStep(RunningStep):
    """A step on the device. `drawn`: indexes of the segments whose tokens follow the decode rows' in `fetched`."""

    def __init__(
        self,
        clock: DeviceClock,
        host_logits: HostLogits,
        start: Mark,
        end: Mark,
        fetched: FetchedTokens | None = None,
        num_decodes: int = 0,
        num_segments: int = 0,
        drawn: Sequence[int] = (),
        careful: dict[int, CarefulSegment] | None = None,
    ) -> None:
        self._clock = clock
        self._host_logits = host_logits
        self._start, self._end = start, end
        self._fetched = fetched
        self._num_decodes = num_decodes
        self._num_segments = num_segments
        self._drawn = drawn
        self._careful = careful or {}

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        return self._end.is_reached

    def wait(self) -> None:
        self._end.wait()

    def output(self) -> StepOutput:
        self._end.wait()
        start_ns, end_ns = self._clock.place(self._start, self._end)
        all_tokens = np.zeros(0, np.int32) if self._fetched is None else self._fetched.tokens()
        of_segment = dict(zip(self._drawn, all_tokens[self._num_decodes :].tolist(), strict=True))
        segments = [
            self._host_logits.careful_output(self._careful[index], of_segment.get(index))
            if index in self._careful
            else SegmentOutput(token=of_segment.get(index))
            for index in range(self._num_segments)
        ]
        return StepOutput(tokens=all_tokens[: self._num_decodes], segments=segments, start_ns=start_ns, end_ns=end_ns)
