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

Others hold a KV transfer for MS in the phase that they name; STEP counts the transfers that come to it, from 1 on:
reserved, written, scattering, validated on the decode side, writing on the prefill side (see held_transfers).
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
    RESERVED = "reserved"
    WRITING = "writing"
    PIECE = "piece"
    WRITTEN = "written"
    SCATTERING = "scattering"
    VALIDATED = "validated"


_OF_PLANS = (FaultKind.REFUSE, FaultKind.DIE)
_OF_RESULTS = (FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.REORDER, FaultKind.VANISH, FaultKind.HANG)


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
    """Decides which fault hits a step. Asked once for every plan (refuse, die), for every result, and whenever a
    transfer has come to a phase."""

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 0) -> None:
        self._faults = list(faults)
        self._random = random.Random(seed)

    def strikes(self, step_id: int) -> FaultKind | None:
        """The fault of this plan, which runs instead of its step: REFUSE, DIE, or nothing."""
        fault = self._next(step_id, _OF_PLANS)
        return None if fault is None else fault.kind

    def hit(self, step_id: int) -> Fault | None:
        """The fault for this step's result, None for none."""
        return self._next(step_id, _OF_RESULTS)

    def holds(self, phase: FaultKind, number: int) -> Fault | None:
        """The fault that holds this transfer, None for none. number: of transfers in that phase, from 1 on."""
        return self._next(number, (phase,))

    def _next(self, number: int, kinds: tuple[FaultKind, ...]) -> Fault | None:
        for fault in self._faults:
            if fault.kind not in kinds:
                continue
            if fault.step == number:
                self._faults.remove(fault)
                return fault
            if fault.step is None and self._random.random() < fault.probability:
                return fault
        return None
