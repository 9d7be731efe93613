"""Plans as they came, in a file, to be sent again to a worker that starts from the same state."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from radixmesh.worker.v1 import worker_pb2

_LENGTH = struct.Struct("<I")


class PlanRecorder:
    """Appends every plan of one epoch: its bytes behind their number. A plan of another epoch begins the file anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._epoch = 0

    def record(self, plan: worker_pb2.StepPlan) -> None:
        if plan.header.epoch != self._epoch:
            self._epoch = plan.header.epoch
            self._file.seek(0)
            self._file.truncate()
        data = plan.SerializeToString()
        self._file.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._file.close()


def read_plans(path: Path) -> Iterator[worker_pb2.StepPlan]:
    """The plans of a record, in their order; one that was cut off by the end of the file is left out."""
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            data = file.read(length)
            if len(data) < length:
                return
            yield worker_pb2.StepPlan.FromString(data)
