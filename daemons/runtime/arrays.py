"""Integer and float arrays as they cross a process: little-endian bytes, one copy to decode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_I32 = np.dtype("<i4")
_F32 = np.dtype("<f4")


def empty_ints() -> IntArray:
    return np.empty(0, np.int32)


def as_ints(values: Sequence[int] | IntArray) -> IntArray:
    """Contiguous int32 array of `values`; an int32 array comes back as it is."""
    return np.ascontiguousarray(values, dtype=np.int32)


def pack_ints(values: Sequence[int] | IntArray) -> bytes:
    """Little-endian int32 bytes of `values`."""
    return np.asarray(values, dtype=_I32).tobytes()


def unpack_ints(data: bytes, field: str) -> IntArray:
    """Read-only int32 view of `data`. Raises MALFORMED_MESSAGE, naming `field`, if the length is no multiple of 4."""
    _check_length(data, field)
    return np.frombuffer(data, dtype=_I32)


def unpack_list(data: bytes, field: str) -> list[int]:
    """The values of unpack_ints() as a list: for short arrays, without an array of numpy in between."""
    _check_length(data, field)
    return memoryview(data).cast("i").tolist()


def pack_floats(values: Sequence[float] | FloatArray) -> bytes:
    """Little-endian float32 bytes of `values`."""
    return np.asarray(values, dtype=_F32).tobytes()


def unpack_floats(data: bytes, field: str) -> FloatArray:
    """Read-only float32 view of `data`. Raises MALFORMED_MESSAGE, naming `field`, if the length is no multiple of 4."""
    _check_length(data, field)
    return np.frombuffer(data, dtype=_F32)


def _check_length(data: bytes, field: str) -> None:
    if len(data) % 4:
        raise MeshError(
            common_pb2.ERROR_REASON_MALFORMED_MESSAGE,
            f"{field} holds {len(data)} bytes: an array of 4-byte values needs a multiple of 4",
            {"field": field},
        )
