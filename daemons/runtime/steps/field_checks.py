"""Checks of the fields of plans and results that their bytes alone can fail. Errors name the field."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import IntArray, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError

_MAX_INT32 = 2**31 - 1


def ids_from(data: bytes, field: str, least: int = 0) -> IntArray:
    """int32 array of values >= `least`. Raises MALFORMED_MESSAGE or INVALID_ARGUMENT, naming `field`."""
    values = unpack_ints(data, field)
    # Not values.min(): two functions of Python more, as long as the minimum of what most messages have.
    if len(values) and np.minimum.reduce(values) < least:
        position = int(np.argmax(values < least))
        message = f"{field}[{position}] is {values[position]}: values start at {least}"
        raise MeshError(common_pb2.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field, "min": str(least)})
    return values


def check_lengths(field: str, lengths: Sequence[int]) -> None:
    """Raises MALFORMED_MESSAGE unless all lengths are equal."""
    if len(set(lengths)) > 1:
        counted = " and ".join(str(length) for length in lengths)
        message = f"the arrays of {field} hold {counted} values: they belong together and need the same length"
        raise MeshError(common_pb2.ERROR_REASON_MALFORMED_MESSAGE, message, {"field": field})


def check_at_least(field: str, value: int, least: int) -> None:
    """Raises INVALID_ARGUMENT for a smaller value."""
    if value < least:
        raise MeshError(
            common_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"{field} is {value}: values start at {least}",
            {"field": field, "min": str(least)},
        )


def check_int32(field: str, value: int) -> None:
    """Raises INVALID_ARGUMENT for a value that is no int32; it is not negative."""
    if value > _MAX_INT32:
        raise MeshError(
            common_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"{field} is {value}: lengths end at {_MAX_INT32}",
            {"field": field, "max": str(_MAX_INT32)},
        )
