"""A simulated device whose host learns tokens late: what a GPU runner looks like to the executor above it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, StepResult
from radixmesh.daemons.worker.runner import DecodeRows, Segment, StepOutput
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.uneven_runner import UnevenRunner
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


class SkippingRunner(LaggingRunner):
    """Some decode rows yield nothing, as those whose masks are late: exact lengths are its own."""

    skips_rows = True

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self._lengths = np.full(1024, _UNKNOWN, np.int32)
        self._rng = np.random.default_rng(5)
        self.num_skipped = 0

    def admitted(self, admit: Admit) -> None:
        super().admitted(admit)
        self._lengths[admit.slot] = len(admit.prompt_ids) + len(admit.output_ids)

    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        is_taken = self._rng.random(len(rows.slots)) < 0.7
        self.num_skipped += int((~is_taken).sum())
        slots = rows.slots[is_taken]
        assert (self._lengths[rows.slots] <= rows.positions + 1).all(), "the host counts a token a step"
        taken = replace(
            rows,
            slots=slots,
            ids=self._last_tokens[slots],
            positions=self._lengths[slots] - 1,
            seeds=rows.seeds[is_taken],
            is_sampled=rows.is_sampled[is_taken],
        )
        output = replace(self.step(taken, segments, ready_ns), counts=is_taken.astype(np.int32))
        self._last_tokens[slots] = output.tokens
        self._lengths[slots] += 1
        for segment, got in zip(segments, output.segments, strict=True):
            if got.token is not None and segment.sample is not None:
                self._last_tokens[segment.slot] = got.token
                self._lengths[segment.slot] = segment.sample.position + 1
        event = LaggingEvent()
        return StepHandle(event, lambda: (event.wait(), output)[1])


class LateGuides:
    """In place of an executor's guides: every slot follows a grammar, and its mask is there at random."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(6)
        self.num_late = 0
        self.has_errors = False

    def __len__(self) -> int:
        return 1

    def is_late(self, slot: int) -> bool:
        is_late = bool(self._rng.random() < 0.4)
        self.num_late += is_late
        return is_late

    def errors(self) -> Sequence[object]:
        return ()

    def wait(self, slots: object, seconds: object) -> None:
        return

    follow = released = clear = lambda *_: None


class LaggingUnevenRunner(UnevenRunner):
    """Decodes yield any number of tokens, and exact lengths are its own: the host hears of them late."""

    is_asynchronous = True

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self._last_tokens, self._lengths = np.full((2, 1024), _UNKNOWN, np.int32)
        self._num_top: dict[int, int | None] = {}

    def can_batch(self, sampling: Sampling) -> bool:
        return True

    def admitted(self, admit: Admit) -> None:
        self._last_tokens[admit.slot] = (admit.output_ids if len(admit.output_ids) else admit.prompt_ids)[-1]
        self._lengths[admit.slot] = len(admit.prompt_ids) + len(admit.output_ids)
        self._num_top[admit.slot] = admit.sampling.num_top_logprobs

    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        output = self._run(rows, segments, ready_ns)
        for segment, got in zip(segments, output.segments, strict=True):
            if segment.sample is not None and got.token is not None:
                self._last_tokens[segment.slot] = got.token
                self._lengths[segment.slot] = segment.sample.position + 1
        event = LaggingEvent()
        return StepHandle(event, lambda: (event.wait(), output)[1])

    def _run(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepOutput:
        bounds, slots = rows.bounds, rows.slots
        assert bounds is not None and rows.max_tokens is None
        lengths = self._lengths[slots]
        assert (lengths >= bounds.known_lens).all()
        room = np.clip(bounds.max_lens - lengths, 0, self.max_tokens_per_row).astype(np.int32)
        ids = self._last_tokens[slots]
        exact = replace(rows, ids=ids, positions=lengths - 1, max_tokens=room, bounds=None)
        output = self.step(exact, segments, ready_ns)
        assert output.counts is not None
        ends = np.cumsum(output.counts)
        yields = output.counts > 0
        self._last_tokens[slots[yields]] = output.tokens[ends[yields] - 1]
        self._lengths[slots] += output.counts
        logprobs = {
            row: self._logprobs(output.tokens[end - count : end], num_top)
            for row, (slot, end, count) in enumerate(zip(slots.tolist(), ends, output.counts, strict=True))
            if (num_top := self._num_top[slot]) is not None and count
        }
        return replace(output, logprobs=logprobs)


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
