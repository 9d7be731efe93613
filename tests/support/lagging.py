"""A simulated device whose host learns tokens late: what a GPU runner looks like to the executor above it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.steps.step import Admit, StepResult
from radixmesh.daemons.worker.runner import DecodeRows, Segment, StepOutput
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle
from support.planner_world import World

_UNKNOWN = np.int32(-7)


class LaggingEvent(DeviceEvent):
    """Done once somebody has waited for it."""

    is_done = False

    def wait(self) -> None:
        self.is_done = True


class LaggingRunner(SimulatedRunner):
    """Decode rows continue from its own tokens, never from the ids of the rows."""

    is_asynchronous = True

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._last_tokens = np.full(1024, _UNKNOWN, np.int32)

    def admitted(self, admit: Admit) -> None:
        self._last_tokens[admit.slot] = (admit.output_ids if len(admit.output_ids) else admit.prompt_ids)[-1]

    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        ids = self._last_tokens[rows.slots]
        assert (ids != _UNKNOWN).all()
        output = self.step(replace(rows, ids=ids), segments, ready_ns)
        self._last_tokens[rows.slots] = output.tokens
        for segment, got in zip(segments, output.segments, strict=True):
            if got.token is not None:
                self._last_tokens[segment.slot] = got.token
        event = LaggingEvent()

        def collect() -> StepOutput:
            event.wait()
            return output

        return StepHandle(event, collect)


class LaggingWorld(World):
    """Plans are launched at once and finished `lag` plans later, or when there are no more."""

    def __init__(self, *, lag: int, **choices: object) -> None:
        self.launched: deque[StepHandle[StepResult]] = deque()
        self.lag = lag
        choices.setdefault("runner_class", LaggingRunner)
        super().__init__(**choices)  # type: ignore[arg-type]

    def execute(self) -> bool:
        if self.plans:
            self.launched.append(self.executor.launch(self.plans.popleft()))
            if len(self.launched) <= self.lag:
                return True
        if not self.launched:
            return False
        self.results.append(self.launched.popleft().result())
        return True

    def begin_epoch(self) -> int:
        while self.launched:
            self.execute()
        return super().begin_epoch()
