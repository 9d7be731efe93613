"""No field of any request without a bound: coverage from the descriptors, and the bounds on the wire one by one."""

from __future__ import annotations

import time
from importlib import import_module

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hostile.bounds import BOUNDS, WIRE
from hostile.fields import Place, places, rpcs

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc import wire_bounds
from radixmesh.daemons.runtime.rpc.wire_bounds import UNSCANNED_BYTES, scan_of

SMALL = 1024
PLACES = [place for rpc in rpcs() for place in places(rpc)]
NAMES = {place.field.full_name for place in PLACES}


def test_every_sized_field_of_every_request_has_a_row() -> None:
    assert len(PLACES) > 150 and len(NAMES) > 120
    missing, gone = sorted(NAMES - BOUNDS.keys()), sorted(BOUNDS.keys() - NAMES)
    assert not missing, f"say in tests/hostile/bounds.py what bounds these fields, and where: {missing}"
    assert not gone, f"these fields are no more: {gone}"


def test_what_is_said_to_enforce_a_bound_is_there() -> None:
    for where in {bound.where for bound in BOUNDS.values()}:
        module, _, name = where.partition(":")
        assert hasattr(import_module(module), name), where


def _is_counted(field: FieldDescriptor) -> bool:
    return field.is_repeated and field.type in (9, 11, 12)


def on_the_wire(place: Place) -> int:
    """The most that the scan lets through at that place; 0 = it is not looked at there."""
    field = place.field
    if place.rpc.is_stream and len(place.path) > 1 and (BOUNDS[field.full_name].most < SMALL or not _is_counted(field)):
        return 0  # In an entry of a frame elements are counted, where it is not too small to do harm.
    scanned = wire_bounds.fields_of(field.containing_type)[field.number]
    if field.is_repeated:
        return scanned.max_count if field.type in (9, 11, 12) else scanned.max_bytes
    return scanned.max_bytes


def test_the_scan_looks_at_every_repeated_and_string_field_of_calls_and_counts_in_frames() -> None:
    unary = [place for place in PLACES if not place.rpc.is_stream]
    assert all(on_the_wire(place) for place in unary if place.field.is_repeated or place.field.type == 9)
    inner = [place for place in PLACES if place.rpc.is_stream and len(place.path) > 1 and _is_counted(place.field)]
    assert all(on_the_wire(place) or BOUNDS[place.field.full_name].most < SMALL for place in inner)
    assert sum(on_the_wire(place) > 0 for place in inner) > 3


@pytest.mark.parametrize("place", [place for place in PLACES if on_the_wire(place)], ids=str)
def test_the_largest_legal_passes_the_scan_and_the_smallest_illegal_does_not(place: Place) -> None:
    scan = scan_of(place.rpc.method)
    assert scan is not None
    most = on_the_wire(place)
    bound = BOUNDS[place.field.full_name]
    assert bound.where != WIRE or bound.most == most, "the row says another bound than the scan has"
    # Some padding where a few elements are too small a message to be looked at: an unknown field.
    padding = b"\xfa\xff\x3f\x80\x80\x04" + bytes(1 << 16)
    assert len(padding) > UNSCANNED_BYTES
    scan(padding + place.raw(most))
    since_s = time.thread_time()
    with pytest.raises(MeshError) as error:
        scan(padding + place.raw(most + 1))
    assert error.value.reason in (ErrorReason.ERROR_REASON_TOO_LARGE, ErrorReason.ERROR_REASON_TOO_MANY_STOPS)
    assert place.field.full_name in error.value.metadata["field"]
    assert time.thread_time() - since_s < 2
