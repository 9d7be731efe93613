"""Moves experts between ranks when some ranks have much more to do than others.

WATCHING --unbalanced, once in a while--> MOVING one layer, slice by slice --> PLACED --other layers--> WATCHING

Every op is a plan of its own, between two steps of the requests, and the next one waits for its answer. The size of a
slice follows the time that the ones before took.

Legend: L layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.scheduler.group.shared_experts import SharedExperts
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.planning.experts.expert_moves import ExpertMove, fewest_moves
from radixmesh.daemons.scheduler.planning.experts.expert_placement import ExpertSites, place_by_load
from radixmesh.worker.v1 import worker_pb2

_FloatArray = npt.NDArray[np.float64]

# Some 200 steps until a report counts half.
_DECAY = 0.9
# Picks of a layer, times its experts, below which their shares are chance.
_LEAST_PICKS_AN_EXPERT = 32
# A change is worth its moves if the busiest rank has less to do by this part.
_LEAST_GAIN = 0.02
# Layers that one call looks at: each takes a millisecond or two.
_LAYERS_A_CALL = 4
# Seconds that a slice should take. Requests wait as long, far below the second that they may.
_SLICE_S = 0.1
# The most is what a worker takes. An op costs some steps until it is answered, so that large slices are quicker.
_FIRST_SLICE, _LEAST_SLICE, _MOST_SLICE = 1 << 20, 1 << 16, 1 << 28
_ALIGNMENT = 512
# Of the time, requests have this many times as much as moves.
_PAUSE = 3.0
# Intervals from one look to the next are at most 2 to the power of this.
_MOST_DOUBLINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """threshold: experts move when balancedness is below; 0: never. interval_s: from one look at it to the next, twice
    as long after each at which experts moved, until one finds no need."""

    threshold: float = 0.8
    interval_s: float = 60.0


@dataclass(slots=True)
class _Change:
    stage_id: str
    layer: int
    moves: list[ExpertMove]
    first_move: int = 0
    first_byte: int = 0
    is_committing: bool = False


@dataclass(slots=True)
class _Sent:
    step_id: int
    num_bytes: int


@dataclass(slots=True)
class ExpertBalancer:
    """The planner's part that looks after experts; idle (`is_on` False) where no ranks share any."""

    settings: BalanceSettings = field(default_factory=BalanceSettings)
    is_on: bool = False
    num_placed: int = 0
    """Changes that took effect."""
    longest_s: float = 0.0
    """Longest time that an op took."""
    experts: SharedExperts | None = None
    _loads_LE: _FloatArray | None = None
    change: _Change | None = None
    _sent: _Sent | None = None
    _num_changes: int = 0
    _epoch: int = 0
    _next_look_s: float | None = None
    _num_doublings: int = 0
    _not_before_s: float = 0.0
    _pause_s: float = 0.0
    _tried: set[int] = field(default_factory=set)
    _has_moved: bool = False
    """Some layer of those tried has."""
    _bytes_per_s: float = 0.0

    def begin_epoch(self, epoch: int, experts: SharedExperts | None, ops: frozenset[str]) -> None:
        """Starts from the placement that the group has; loads are kept where the model is the same."""
        if self._tried:
            # The group may have died of its moves: the same ones at once would be its end again.
            self._end_look()
        self.experts, self._epoch = experts, epoch
        self.change = self._sent = None
        can_move = {"move_experts", "place_experts"} <= ops
        self.is_on = experts is not None and can_move and self.settings.threshold > 0
        if experts is not None:
            shape = (experts.num_layers, experts.num_experts)
            if self._loads_LE is None or self._loads_LE.shape != shape:
                self._loads_LE = np.zeros(shape)

    def processed(self, result: StepResult) -> None:
        """A result came. Raises PROTOCOL_VIOLATION for loads of another number of experts."""
        if len(result.expert_loads):
            loads_LE = self._loads_LE
            assert loads_LE is not None
            if len(result.expert_loads) != loads_LE.size:
                message = f"the ranks report loads of {len(result.expert_loads)} experts, they have {loads_LE.size}"
                raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
            self._loads_LE = _DECAY * loads_LE + result.expert_loads.reshape(loads_LE.shape)
        if self._sent is not None and result.step_id == self._sent.step_id:
            self._answered(self._sent, (result.device_end_ns - result.device_start_ns) / 1e9)

    def balancedness(self) -> float:
        """Mean over most of the ranks' work, layer by layer, as the placement divides the loads; 0: not known."""
        if self.experts is None or self._loads_LE is None or not self._loads_LE.any():
            return 0.0
        loads_LR = _rank_loads(self.experts, self._loads_LE)
        return float(loads_LR.mean(axis=1).sum() / loads_LR.max(axis=1).sum())

    def rows_by_rank(self, loads: IntArray) -> list[float]:
        """Pairs of a row and an expert that each rank computes of such picks, as the placement divides them; empty: no
        ranks share experts, or not so many."""
        experts = self.experts
        if experts is None or len(loads) != experts.num_layers * experts.num_experts:
            return []
        loads_LE = loads.reshape(experts.num_layers, -1).astype(np.float64)
        rows: list[float] = _rank_loads(experts, loads_LE).sum(axis=0).tolist()
        return rows

    def next_op(self, now: float, step_id: int) -> worker_pb2.BarrierOp | None:
        """The op of the next plan, which will be that step; None: a plan as ever."""
        if self._sent is not None or self.experts is None:
            return None
        if self._pause_s:
            self._not_before_s, self._pause_s = now + self._pause_s, 0.0
        if now < self._not_before_s:
            return None
        if self.change is None and not self._find_change(now):
            return None
        assert self.change is not None
        op, num_bytes = self._op_of(self.change)
        self._sent = _Sent(step_id, num_bytes)
        return op

    def _find_change(self, now: float) -> bool:
        """Looks for a layer that a change would help; False: for now there is none."""
        if self._next_look_s is None:
            self._next_look_s = now + self.settings.interval_s * 2**self._num_doublings
        if now < self._next_look_s:
            return False
        experts, loads_LE = self.experts, self._loads_LE
        assert experts is not None and loads_LE is not None
        is_balanced = self.balancedness() >= self.settings.threshold
        layers = [] if is_balanced else self._worst_layers(experts, loads_LE)
        for layer in layers:
            self._tried.add(layer)
            moves = _moves_of(experts, layer, loads_LE[layer])
            if moves:
                self._num_changes += 1
                self._has_moved = True
                self.change = _Change(f"{self._epoch}.{self._num_changes}", layer, moves)
                return True
        if not layers:  # Otherwise the others are for the next call.
            if is_balanced and not self._has_moved:
                self._num_doublings = 0
            self._end_look()
        return False

    def _end_look(self) -> None:
        """The next one is an interval away. Moves double it: loads that cannot be balanced would be moved for ever."""
        if self._has_moved:
            self._num_doublings = min(self._num_doublings + 1, _MOST_DOUBLINGS)
        self._has_moved, self._next_look_s = False, None
        self._tried.clear()

    def _worst_layers(self, experts: SharedExperts, loads_LE: _FloatArray) -> list[int]:
        """The next few, those in which a rank has most beyond the mean first."""
        loads_LR = _rank_loads(experts, loads_LE)
        excess_L = loads_LR.max(axis=1) - loads_LR.mean(axis=1)
        is_known_L = loads_LE.sum(axis=1) >= _LEAST_PICKS_AN_EXPERT * experts.num_experts
        order = np.argsort(-excess_L, kind="stable").tolist()
        return [layer for layer in order if layer not in self._tried and is_known_L[layer]][:_LAYERS_A_CALL]

    def _op_of(self, change: _Change) -> tuple[worker_pb2.BarrierOp, int]:
        experts = self.experts
        assert experts is not None
        if change.first_move == len(change.moves):
            change.is_committing = True
            commit = worker_pb2.CommitStaged(stage_id=change.stage_id)
            return worker_pb2.BarrierOp(place_experts=commit), 0
        size = _FIRST_SLICE if not self._bytes_per_s else int(self._bytes_per_s * _SLICE_S)
        size = min(max(size, _LEAST_SLICE), _MOST_SLICE)
        whole = max(1, size // experts.expert_bytes)
        moves = change.moves[change.first_move : change.first_move + (1 if change.first_byte else whole)]
        part = max(1, size // len(moves))
        # Copies of bytes that are not aligned are slow.
        part = part - part % _ALIGNMENT or part
        num_bytes = min(experts.expert_bytes - change.first_byte, part)
        op = worker_pb2.MoveExperts(
            stage_id=change.stage_id,
            layer=change.layer,
            sources=pack_ints([move.source for move in moves]),
            targets=pack_ints([move.target for move in moves]),
            first_byte=change.first_byte,
            num_bytes=num_bytes,
        )
        change.first_byte += num_bytes
        if change.first_byte == experts.expert_bytes:
            change.first_byte = 0
            change.first_move += len(moves)
        return worker_pb2.BarrierOp(move_experts=op), num_bytes * len(moves)

    def _answered(self, sent: _Sent, seconds: float) -> None:
        self._sent = None
        self._pause_s = _PAUSE * max(0.0, seconds)
        self.longest_s = max(self.longest_s, seconds)
        if sent.num_bytes and seconds > 0:
            speed = sent.num_bytes / seconds
            # Slower at once, faster step by step: one slice that was quick says little of the next.
            self._bytes_per_s = min(speed, 2 * self._bytes_per_s) if self._bytes_per_s else speed
        change, experts = self.change, self.experts
        if change is None or experts is None or not change.is_committing:
            return
        experts_LS = experts.experts_LS.copy()
        experts_S = experts.experts_LS[change.layer]
        for move in change.moves:
            experts_LS[change.layer, move.target] = experts_S[move.source]
        self.experts = replace(experts, version=experts.version + 1, experts_LS=experts_LS)
        self.change = None
        self.num_placed += 1


def barrier_plan(state: EpochState, op: worker_pb2.BarrierOp) -> StepPlan:
    """A plan with that op alone; slots stay as they are."""
    return StepPlan(
        epoch=state.epoch,
        step_id=state.next_step_id,
        group_generation=state.group.group_generation,
        barrier_ops=(op,),
        has_forward=False,
    )


def _rank_loads(experts: SharedExperts, loads_LE: _FloatArray) -> _FloatArray:
    """[L, R]: picks that each rank computes, if copies of an expert have equal parts of them."""
    return np.stack([_loads_of(experts, layer, loads_E) for layer, loads_E in enumerate(loads_LE)])


def _loads_of(experts: SharedExperts, layer: int, loads_E: _FloatArray) -> _FloatArray:
    """[R]: those of one layer."""
    experts_S = experts.experts_LS[layer]
    copies_E = np.bincount(experts_S[experts_S >= 0], minlength=experts.num_experts)
    slots_S = np.where(experts_S >= 0, (loads_E / copies_E)[experts_S], 0.0)
    loads_R: _FloatArray = slots_S.reshape(experts.num_ranks, -1).sum(axis=1)
    return loads_R


def _moves_of(experts: SharedExperts, layer: int, loads_E: _FloatArray) -> list[ExpertMove]:
    """Moves that bring a layer to the placement of its loads; empty: it would not help."""
    sites = ExpertSites(num_ranks=experts.num_ranks, num_slots=experts.num_slots)
    by_rank = place_by_load(loads_E.tolist(), sites)
    copies_E = np.bincount([expert for of_rank in by_rank for expert in of_rank], minlength=experts.num_experts)
    most = max(float((loads_E / copies_E)[of_rank].sum()) for of_rank in by_rank)
    before = float(_loads_of(experts, layer, loads_E).max())
    if most > (1.0 - _LEAST_GAIN) * before:
        return []
    return fewest_moves(experts.experts_LS[layer].tolist(), by_rank)
