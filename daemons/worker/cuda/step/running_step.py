"""A step that was launched on a device: its end event, its tokens, and the segments still to be sampled on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.worker.cuda.device import DeviceClock, DeviceEvent
from radixmesh.daemons.worker.cuda.step.host_logits import HostLogits, HostSampledSegment
from radixmesh.daemons.worker.cuda.step.token_ring import FetchedTokens
from radixmesh.daemons.worker.runner import RunningStep, SegmentOutput, StepOutput


class RunningDeviceStep(RunningStep):
    """A step on the device. `sampled`: indexes of the segments whose tokens follow the decode rows' in `fetched`."""

    def __init__(
        self,
        clock: DeviceClock,
        host_logits: HostLogits,
        start: DeviceEvent,
        end: DeviceEvent,
        fetched: FetchedTokens | None = None,
        num_decodes: int = 0,
        num_segments: int = 0,
        sampled: Sequence[int] = (),
        host_sampled: dict[int, HostSampledSegment] | None = None,
    ) -> None:
        self._clock = clock
        self._host_logits = host_logits
        self._start, self._end = start, end
        self._fetched = fetched
        self._num_decodes = num_decodes
        self._num_segments = num_segments
        self._sampled = sampled
        self._host_sampled = host_sampled or {}

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        return self._end.is_done

    def wait(self) -> None:
        self._end.wait()

    def output(self) -> StepOutput:
        self._end.wait()
        start_ns, end_ns = self._clock.place(self._start, self._end)
        all_tokens = np.zeros(0, np.int32) if self._fetched is None else self._fetched.tokens()
        of_segment = dict(zip(self._sampled, all_tokens[self._num_decodes :].tolist(), strict=True))
        segments = [
            self._host_logits.output_of(self._host_sampled[index], of_segment.get(index))
            if index in self._host_sampled
            else SegmentOutput(token=of_segment.get(index))
            for index in range(self._num_segments)
        ]
        return StepOutput(tokens=all_tokens[: self._num_decodes], segments=segments, start_ns=start_ns, end_ns=end_ns)
