"""A step that was launched on a device: when it is over, what came of it, what is still to be drawn on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixmesh.daemons.worker.cuda.device import Mark
from radixmesh.daemons.worker.cuda.token_ring import FetchedTokens
from radixmesh.daemons.worker.runner import RunningStep, Segment, SegmentOutput, StepOutput

if TYPE_CHECKING:
    from radixmesh.daemons.worker.cuda.runner import DeviceRunner


@dataclass(frozen=True, slots=True)
class CarefulSegment:
    """A segment, copied from the host's tables, and its rows of hidden states."""

    segment: Segment
    hidden_TD: torch.Tensor

    @classmethod
    def of(cls, segment: Segment, hidden_TD: torch.Tensor) -> CarefulSegment:
        """A copy: the host's tables change while the step runs."""
        return cls(_copied(segment), hidden_TD)


class RunningDeviceStep(RunningStep):
    """A step on the device. `drawn`: indexes of the segments whose tokens follow the decode rows' in `fetched`."""

    def __init__(
        self,
        runner: DeviceRunner,
        start: Mark,
        end: Mark,
        fetched: FetchedTokens | None = None,
        num_decodes: int = 0,
        num_segments: int = 0,
        drawn: Sequence[int] = (),
        careful: dict[int, CarefulSegment] | None = None,
    ) -> None:
        self._runner = runner
        self._start, self._end = start, end
        self._fetched = fetched
        # Tokens are on the host a little after the step is over.
        self._done = end if fetched is None else fetched.mark
        self._num_decodes = num_decodes
        self._num_segments = num_segments
        self._drawn = drawn
        self._careful = careful or {}

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        return self._done.is_reached

    def wait(self) -> None:
        self._done.wait()

    def output(self) -> StepOutput:
        self._done.wait()
        start_ns, end_ns = self._runner.place(self._start, self._end)
        all_tokens = np.zeros(0, np.int32) if self._fetched is None else self._fetched.tokens()
        of_segment = dict(zip(self._drawn, all_tokens[self._num_decodes :].tolist(), strict=True))
        segments = [
            self._runner.careful_output(self._careful[index], of_segment.get(index))
            if index in self._careful
            else SegmentOutput(token=of_segment.get(index))
            for index in range(self._num_segments)
        ]
        return StepOutput(tokens=all_tokens[: self._num_decodes], segments=segments, start_ns=start_ns, end_ns=end_ns)


def _copied(segment: Segment) -> Segment:
    """The same with arrays of its own."""
    sample = segment.sample
    if sample is not None:
        sample = replace(sample, output_ids=sample.output_ids.copy())
    return replace(segment, ids=segment.ids.copy(), pages=segment.pages.copy(), sample=sample)
