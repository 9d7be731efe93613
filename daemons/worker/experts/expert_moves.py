"""Moves experts between the ranks that share them, while the worker serves.

A change is of one layer: slices of weights come into memory that no step reads (move_experts), then all of them take
effect at once (place_experts). Both are barrier ops of plans, so that the ranks do them between the same two steps.

Legend: L layers with routed experts, S slots of a layer on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, pack_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.experts.expert_slots import ExpertSlots
from radixmesh.worker.v1 import worker_pb2

MAX_SLICE_BYTES = 256 * 1024 * 1024
_MAX_ID_BYTES = 256
# Far below what the wire carries: it counts on.
_MAX_VERSION = 1 << 61
# Forwards from one report of the experts' loads to the next: some ten KiB, which no step of decodes should carry.
REPORT_FORWARDS = 32

Wanted = tuple[int, int, int]
"""Layer, slot on this rank, expert."""
Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""As Communicator.all_to_all, of rows that lie where the weights do."""
ReadExperts = Callable[[Sequence[Wanted]], None]
"""Fills slots with experts of the checkpoint. Raises BAD_CHECKPOINT."""


class MovableExperts(Protocol):
    """The experts of one layer, of which this rank has some."""

    slots: ExpertSlots
    """Of all ranks."""

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""

    def bytes_of(self, slot: int) -> list[torch.Tensor]:
        """The weights at a slot of this rank as they lie in memory, uint8 views."""

    def place(self, experts_S: torch.Tensor) -> None:
        """Other experts are at the slots of all ranks, from the next step on. int64 on the host."""


@dataclass(slots=True)
class _Stage:
    """A change under way. sources: by target slot; num_bytes: that have come of its expert. memory: of the targets on
    this rank, whole experts."""

    stage_id: str
    layer: int
    sources: dict[int, int] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    memory: dict[int, torch.Tensor] = field(default_factory=dict)


class ExpertMoves:
    """One rank's end. check() is asked before apply(); both on the step thread.

    All ranks have the same placement and are sent the same ops, so they refuse the same ones. `read`: for experts that
    no rank has in memory any more. exchange: by default the group's own.
    """

    def __init__(
        self, layers: Sequence[MovableExperts], group: RankGroup, read: ReadExperts, exchange: Exchange | None = None
    ) -> None:
        first = layers[0]
        self.num_experts, self.per_rank = first.slots.num_experts, first.slots.per_rank
        self.expert_bytes = first.expert_bytes
        self.version = 0
        self._layers = tuple(layers)
        self._group, self._exchange = group, exchange or group.all_to_all
        self._read = read
        self._first = self.placement
        self._own = slice(group.rank * self.per_rank, (group.rank + 1) * self.per_rank)
        # The weights that really lie here; -1 where reading was cut off.
        self._held = self._first[:, self._own].copy()
        self._stage: _Stage | None = None
        self._num_forwards = 0

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def placement(self) -> IntArray:
        """int32 [L, S], the expert at each slot; -1: none."""
        return np.stack([layer.slots.experts_S.numpy() for layer in self._layers]).astype(np.int32)

    def to_proto(self) -> worker_pb2.ExpertPlacement:
        return worker_pb2.ExpertPlacement(version=self.version, experts=pack_ints(self.placement.ravel()))

    def take_loads(self) -> IntArray | None:
        """int32 [L x experts], picks by this rank's rows since the last report; None: not yet. Call it once a
        forward."""
        self._num_forwards += 1
        if self._num_forwards < REPORT_FORWARDS:
            return None
        self._num_forwards = 0
        with torch.inference_mode():
            loads = torch.stack([layer.slots.picks_E for layer in self._layers])
            for layer in self._layers:
                layer.slots.picks_E.zero_()
        return loads.numpy().astype(np.int32).ravel()

    def drop(self) -> None:
        """Forgets what was brought and not placed: a new epoch knows nothing of it."""
        self._stage = None

    def check(self, op: worker_pb2.BarrierOp) -> None:
        """Raises INVALID_ARGUMENT for an op that cannot be applied."""
        if op.WhichOneof("op") == "move_experts":
            self._check_move(op.move_experts)
        else:
            self._check_place(op.place_experts)

    def apply(self, op: worker_pb2.BarrierOp) -> None:
        """Does what check() has allowed, with the other ranks. Raises CollectiveAborted."""
        with torch.inference_mode():
            if op.WhichOneof("op") == "move_experts":
                self._move(op.move_experts)
            else:
                self._place()

    def adopt(self, placement: worker_pb2.ExpertPlacement | None) -> None:
        """Makes a placement this rank's, whatever it has in memory; None: that of the loaded weights.

        Reads what it lacks, which takes as long as it takes. No step runs. Raises INVALID_ARGUMENT or BAD_CHECKPOINT.
        """
        self.drop()
        experts_LS = self._first
        if placement is not None:
            if placement.version > _MAX_VERSION:
                raise _invalid(f"the placement's version is {placement.version}: nothing counts so far")
            experts_LS = self._checked(unpack_ints(placement.experts, "experts.experts"))
        wanted = experts_LS[:, self._own]
        lacking = np.argwhere((wanted >= 0) & (wanted != self._held))
        if len(lacking):
            self._held[tuple(lacking.T)] = -1
            self._read([(layer, slot, int(wanted[layer, slot])) for layer, slot in lacking.tolist()])
            self._held[tuple(lacking.T)] = wanted[tuple(lacking.T)]
        with torch.inference_mode():
            for layer, experts_S in zip(self._layers, experts_LS, strict=True):
                layer.place(torch.from_numpy(experts_S.astype(np.int64)))
        self.version = 0 if placement is None else placement.version

    def _checked(self, experts: IntArray) -> IntArray:
        """As [L, S]. Raises INVALID_ARGUMENT unless each layer has all of its experts."""
        shape = self._first.shape
        if len(experts) != shape[0] * shape[1]:
            raise _invalid(f"the placement names {len(experts)} slots of experts, this model has {shape[0] * shape[1]}")
        experts_LS = experts.reshape(shape)
        if experts_LS.min() < -1 or experts_LS.max() >= self.num_experts:
            raise _invalid(f"the placement names experts outside [-1, {self.num_experts})")
        for layer, experts_S in enumerate(experts_LS):
            if len(np.unique(experts_S[experts_S >= 0])) < self.num_experts:
                raise _invalid(f"the placement leaves experts of layer {layer} without a slot")
        return experts_LS

    def _check_move(self, op: worker_pb2.MoveExperts) -> None:
        sources, targets = unpack_ints(op.sources, "sources"), unpack_ints(op.targets, "targets")
        num_slots = self._first.shape[1]
        if not op.stage_id or len(op.stage_id.encode()) > _MAX_ID_BYTES:
            raise _invalid(f"stage_id has {len(op.stage_id.encode())} bytes: send 1 to {_MAX_ID_BYTES}")
        if op.layer >= self.num_layers:
            raise _invalid(f"layer {op.layer} is none of the {self.num_layers} with routed experts")
        if not len(targets) or len(sources) != len(targets) or len(np.unique(targets)) != len(targets):
            raise _invalid(f"{len(sources)} sources and {len(targets)} targets: send pairs, each target once")
        both = np.concatenate((sources, targets))
        if both.min() < 0 or both.max() >= num_slots:
            raise _invalid(f"a slot is outside [0, {num_slots})")
        if (self._layers[op.layer].slots.experts_S[torch.from_numpy(sources.astype(np.int64))] < 0).any():
            raise _invalid("a source is an empty slot")
        last = op.first_byte + op.num_bytes
        if not op.num_bytes or last > self.expert_bytes or op.num_bytes * len(targets) > MAX_SLICE_BYTES:
            raise _invalid(
                f"bytes [{op.first_byte}, {last}) of {len(targets)} experts: an expert has {self.expert_bytes}, and a"
                f" slice at most {MAX_SLICE_BYTES} of all its targets"
            )
        stage = self._stage
        if stage is not None and stage.stage_id == op.stage_id and stage.layer != op.layer:
            raise _invalid(
                f"change {op.stage_id!r} is of layer {stage.layer}: take another stage_id for layer {op.layer}"
            )
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            is_known = stage is not None and stage.stage_id == op.stage_id and target in stage.sources
            has = stage.num_bytes[target] if stage is not None and is_known else 0
            if has != op.first_byte or (stage is not None and is_known and stage.sources[target] != source):
                raise _invalid(f"slot {target} has {has} bytes of its new expert: slices follow each other")

    def _check_place(self, op: worker_pb2.CommitStaged) -> None:
        stage = self._stage
        if stage is None or stage.stage_id != op.stage_id:
            raise _invalid(f"nothing was moved under stage_id {op.stage_id[:64]!r}: send move_experts first")
        missing = [target for target, num in stage.num_bytes.items() if num < self.expert_bytes]
        if missing:
            raise _invalid(f"slot {missing[0]} has {stage.num_bytes[missing[0]]} of {self.expert_bytes} bytes")
        experts_S = self._after(stage)
        if len(np.unique(experts_S[experts_S >= 0].numpy())) < self.num_experts:
            raise _invalid(f"an expert of layer {stage.layer} would be left without a slot")

    def _move(self, op: worker_pb2.MoveExperts) -> None:
        if self._stage is None or self._stage.stage_id != op.stage_id:
            self._stage = _Stage(op.stage_id, op.layer)
        stage, rank, size = self._stage, self._group.rank, self._group.size
        sources, targets = unpack_ints(op.sources, "sources").tolist(), unpack_ints(op.targets, "targets").tolist()
        cut = slice(op.first_byte, op.first_byte + op.num_bytes)
        moves = [(s, t, s // self.per_rank, t // self.per_rank) for s, t in zip(sources, targets, strict=True)]
        layer = self._layers[op.layer]
        sent = [[s for s, _, start, end in moves if (start, end) == (rank, other)] for other in range(size)]
        came = [[t for _, t, start, end in moves if (start, end) == (other, rank)] for other in range(size)]
        memory = layer.bytes_of(0)[0]
        x = memory.new_empty(sum(map(len, sent)), op.num_bytes)
        for row, slot in enumerate(slot for slots in sent for slot in slots):
            _copy_bytes(layer.bytes_of(slot % self.per_rank), cut, x[row])
        got = self._exchange(x, [len(slots) for slots in sent], [len(slots) for slots in came])
        for row, target in enumerate(target for slots in came for target in slots):
            if target not in stage.memory:
                stage.memory[target] = memory.new_empty(self.expert_bytes)
            stage.memory[target][cut] = got[row]
        for source, target, _, _ in moves:
            stage.sources[target] = source
            stage.num_bytes[target] = stage.num_bytes.get(target, 0) + op.num_bytes

    def _place(self) -> None:
        stage = self._stage
        assert stage is not None
        layer, experts_S = self._layers[stage.layer], self._after(stage)
        for target, memory in stage.memory.items():
            first = 0
            for part in layer.bytes_of(target % self.per_rank):
                part.copy_(memory[first : first + part.numel()])
                first += part.numel()
        layer.place(experts_S)
        self._held[stage.layer] = experts_S[self._own].numpy()
        self.version += 1
        self._stage = None

    def _after(self, stage: _Stage) -> torch.Tensor:
        """int64 [S], the layer's placement once the change is made."""
        before_S = self._layers[stage.layer].slots.experts_S
        experts_S = before_S.clone()
        targets, sources = list(stage.sources), list(stage.sources.values())
        experts_S[targets] = before_S[sources]
        return experts_S


def _copy_bytes(parts: Sequence[torch.Tensor], cut: slice, target: torch.Tensor) -> None:
    """Copies bytes [cut.start, cut.stop) of the parts, one behind the other, to the target: a slice that goes is
    in memory once, as is counted for it."""
    first = 0
    for part in parts:
        start, stop = max(cut.start - first, 0), min(cut.stop - first, part.numel())
        if start < stop:
            target[first + start - cut.start : first + stop - cut.start] = part[start:stop]
        first += part.numel()


def _invalid(what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, what, {"field": "header.barrier_ops"})
