"""Faults on demand, at the border of the Execute stream: what a scheduler must survive, at a step of one's choice.

A fault is written `kind@STEP`, `kind@STEP:MS`, `kind%PROBABILITY` or `kind%PROBABILITY:MS`. At a step: once a process.
With a probability: sampled anew for every step.

  refuse     the plan is refused (INTERNAL) and its epoch ends
  die        the step dies, as of an error of the device: STEP_FAILED, and the process ends
  delay      the result waits for MS (default 100)
  duplicate  the result is sent twice
  reorder    the result is sent after its successor, or after MS (default 100) if none comes
  vanish     the stream ends with UNAVAILABLE instead of the result
  hang       nothing is sent on this stream any more; it stays open
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_PATTERN = re.compile(r"(?P<kind>[a-z]+)(?:@(?P<step>\d+)|%(?P<probability>[0-9.eE-]+))(?::(?P<ms>[0-9.]+))?")
_DEFAULT_MS = 100.0


class FaultKind(StrEnum):
    REFUSE = "refuse"
    DIE = "die"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    VANISH = "vanish"
    HANG = "hang"


_OF_PLANS = (FaultKind.REFUSE, FaultKind.DIE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`step` of any epoch, once, or each step with `probability`; `ms` for the kinds that wait."""

    kind: FaultKind
    step: int | None = None
    probability: float = 0.0
    ms: float = _DEFAULT_MS

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises ValueError that shows how it is written."""
        match = _PATTERN.fullmatch(text.strip())
        kinds = ", ".join(FaultKind)
        if match is None or match["kind"] not in tuple(FaultKind):
            raise ValueError(f"the fault {text!r} is not kind@STEP[:MS] or kind%PROBABILITY[:MS], kind one of {kinds}")
        probability = float(match["probability"] or 0.0)
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"the fault {text!r} has the probability {probability}: choose one in [0, 1]")
        return cls(
            kind=FaultKind(match["kind"]),
            step=int(match["step"]) if match["step"] else None,
            probability=probability,
            ms=float(match["ms"]) if match["ms"] else _DEFAULT_MS,
        )


class FaultInjector:
    """Decides which fault hits a step. Asked once for every plan (refuse, die) and for every result (the others)."""

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 0) -> None:
        self._faults = list(faults)
        self._random = random.Random(seed)

    def strikes(self, step_id: int) -> FaultKind | None:
        """The fault of this plan, which runs instead of its step: REFUSE, DIE, or nothing."""
        fault = self._next(step_id, of_plans=True)
        return None if fault is None else fault.kind

    def hit(self, step_id: int) -> Fault | None:
        """The fault for this step's result, None for none."""
        return self._next(step_id, of_plans=False)

    def _next(self, step_id: int, *, of_plans: bool) -> Fault | None:
        for fault in self._faults:
            if (fault.kind in _OF_PLANS) is not of_plans:
                continue
            if fault.step == step_id:
                self._faults.remove(fault)
                return fault
            if fault.step is None and self._random.random() < fault.probability:
                return fault
        return None
