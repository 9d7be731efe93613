"""Counting fields in the bytes of a message: exact, bounded in time, and left to the parser where they are none."""

from __future__ import annotations

import contextlib
import time

import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc import wire_bounds
from radixmesh.daemons.runtime.rpc.wire_bounds import DEFAULT_COUNT, MAX_COUNTS, check_counts, scan_of
from radixmesh.detokenizer.v1 import detokenizer_pb2  # noqa: F401 - its fields have bounds too.
from radixmesh.router.v1 import router_pb2 as router
from radixmesh.scheduler.v1 import scheduler_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2 as tokenizer

# Some 100 KiB in an unknown field, so that a message is looked at.
PADDING = b"\xfa\xff\x3f\x80\x80\x06" + bytes(6 << 14)


def refusal(raw: bytes, message: type[router.GenerateRequest | router.TokenizeRequest]) -> MeshError | None:
    try:
        check_counts(raw, message.DESCRIPTOR)
    except MeshError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("message", "unit", "name"),
    [
        (router.TokenizeRequest, b"\x12\x00", "radixmesh.router.v1.TokenizeRequest.items"),
        (router.GenerateRequest, b"\x2a\x02\x0a\x00", "radixmesh.tokenizer.v1.ChatInput.messages"),
        (router.GenerateRequest, b"\x7a\x02\x12\x00", "radixmesh.router.v1.Resume.outputs"),
        (router.GenerateRequest, b"\x42\x02\x1a\x00", "radixmesh.common.v1.StopParams.stop"),
    ],
)
def test_the_last_legal_count_passes_and_the_next_does_not(
    message: type[router.GenerateRequest | router.TokenizeRequest], unit: bytes, name: str
) -> None:
    most = MAX_COUNTS.get(name, DEFAULT_COUNT)
    assert refusal(PADDING + unit * most, message) is None
    error = refusal(PADDING + unit * (most + 1), message)
    assert error is not None and error.reason_name == ("TOO_MANY_STOPS" if name.endswith(".stop") else "TOO_LARGE")
    assert error.metadata == {"field": name, "max": str(most)}


@pytest.mark.parametrize("unit", [b"\x12\x00", b"\x9a\x06\x00", b"\x2a\x02\x0a\x00", b"\x18\x01", b"\x0a\x00"])
def test_thirty_mebibytes_of_nothing_are_refused_soon(unit: bytes) -> None:
    raw, since_s = unit * ((30 << 20) // len(unit)), time.thread_time()
    # A unit that is no bounded field of one message may be one of the other.
    errors = [refusal(raw, router.TokenizeRequest), refusal(raw, router.GenerateRequest)]
    assert all(error is not None for error in errors)
    assert time.thread_time() - since_s < 2


def test_a_long_text_is_skipped_and_counts_of_one_chat_in_pieces_add_up() -> None:
    long = router.GenerateRequest(text="x" * (12 << 20)).SerializeToString()
    since_s = time.thread_time()
    assert refusal(long, router.GenerateRequest) is None
    assert time.thread_time() - since_s < 0.5
    half = tokenizer.ChatInput(messages=[tokenizer.ChatMessage(role="user")] * 10_000)
    raw = router.GenerateRequest(chat=half).SerializeToString()
    assert refusal(raw, router.GenerateRequest) is None and refusal(raw * 2, router.GenerateRequest) is not None


@given(raw=st.binary(max_size=200))
@example(raw=b"\x12\x80\x80\x05")
def test_bytes_that_are_no_message_are_the_parsers(raw: bytes) -> None:
    with contextlib.suppress(DecodeError):
        router.GenerateRequest.FromString(raw)
    check = wire_bounds.UNSCANNED_BYTES
    try:
        wire_bounds.UNSCANNED_BYTES = 0
        check_counts(raw, router.GenerateRequest.DESCRIPTOR)
    finally:
        wire_bounds.UNSCANNED_BYTES = check


def test_all_verbs_of_ours_are_scanned_and_no_others() -> None:
    assert scan_of("/radixmesh.router.v1.RouterService/Generate") is not None
    for method in ("/grpc.health.v1.Health/Check", "/no.Such/Verb", "/radixmesh.router.v1.RouterService/No"):
        assert scan_of(method) is None


def _length(number: int) -> bytes:
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))


def test_a_frame_is_looked_into_but_for_its_first_small_entries() -> None:
    frame = scheduler_pb2.ServeRequest.DESCRIPTOR
    submit = b"\x12\x83\x08" + b"\x0a\x80\x08" + b"x" * 1024  # A request id of 1 KiB.
    check_counts(PADDING + submit * 1000, frame, is_frame=True)
    # Each request has as many stop strings as one may have, whatever the others have.
    stops = b"\x1a\xc8\x01" + b"s" * 200
    entry = b"".join(part for part in (b"\x5a", _length(64 * len(stops)), stops * 64))
    check_counts(PADDING + (b"\x12" + _length(len(entry)) + entry) * 200, frame, is_frame=True)
    # 2 MiB of empty elements in one entry: they were 16 MiB of memory and a fifth of a second in the parser.
    with pytest.raises(MeshError):
        check_counts(PADDING + b"\x12\x80\x80\x80\x01" + b"\x92\x01\x00" * (2 << 20), frame, is_frame=True)
    # And in many small entries.
    entry = b"\x12\x80\x1e" + b"\x92\x01\x00" * 1280
    with pytest.raises(MeshError):
        check_counts(PADDING + entry * 4000, frame, is_frame=True)
    with pytest.raises(MeshError):
        check_counts(PADDING + b"\x12\x00" * (DEFAULT_COUNT + 1), frame, is_frame=True)


def test_every_bound_names_a_field_that_there_is() -> None:
    assert all(Default().FindFieldByName(name).is_repeated for name in MAX_COUNTS)
    assert all(Default().FindFieldByName(name) for name in wire_bounds.MAX_BYTES)
