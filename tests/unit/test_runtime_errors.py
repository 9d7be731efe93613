"""Typed errors: the table from reason to status, and the way over messages and back."""

import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from radixmesh.common.v1.common_pb2 import Error, ErrorReason
from radixmesh.daemons.runtime.errors import MeshError, reason_name, reason_of, status_of
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc

_PROTO = Path(__file__).resolve().parents[2] / "protos/radixmesh/common/v1/common.proto"


def test_every_reason_has_the_status_that_its_comment_names() -> None:
    documented = {
        name: status
        for status, name in re.findall(
            r"^  // ([A-Z_]+)\. .*\n(?:  // .*\n)*  ERROR_REASON_(\w+) = \d+;", _PROTO.read_text(), re.M
        )
    }
    named = {reason_name(value): status_of(value) for value in ErrorReason.values() if value != 0}
    assert named == documented


def test_every_status_is_one_of_grpc() -> None:
    for value in ErrorReason.values():
        assert status_of(value) in grpc.StatusCode.__members__


def test_an_error_survives_a_message() -> None:
    error = MeshError(ErrorReason.ERROR_REASON_PROMPT_TOO_LONG, "shorten the prompt", {"prompt_tokens": "9"})
    back = MeshError.from_proto(Error.FromString(error.to_proto().SerializeToString()))
    assert (back.reason, back.message, back.metadata) == (error.reason, error.message, error.metadata)
    assert back.status == "INVALID_ARGUMENT"
    assert str(back) == "PROMPT_TOO_LONG: shorten the prompt [prompt_tokens=9]"


def test_a_reason_of_a_newer_version_is_no_crash() -> None:
    back = MeshError.from_proto(Error.FromString(b"\x08\xe7\x07"))  # reason = 999
    assert (back.reason_name, back.status) == ("UNKNOWN_999", "UNKNOWN")


def test_names_of_reasons_map_both_ways() -> None:
    assert all(reason_of(reason_name(value)) == value for value in ErrorReason.values())
    assert reason_of("NO_SUCH_REASON") is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "NO_REPLICA"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.CANCELLED, "ABORTED"),
        (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"),
        (grpc.StatusCode.DATA_LOSS, "INTERNAL"),
    ],
)
def test_a_status_without_details_gets_a_reason(code: grpc.StatusCode, reason: str) -> None:
    error = mesh_error_from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone"))
    assert (error.reason_name, error.message) == (reason, "gone")


def test_a_message_that_could_not_be_written_met_no_replica() -> None:
    """grpc.aio says INTERNAL of a peer that was killed as a message was written to it: another one is to be asked."""
    empty = grpc.aio.Metadata()
    error = mesh_error_from_rpc(
        grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, empty, empty, details="Internal error from Core")
    )
    assert (error.reason_name, error.status) == ("NO_REPLICA", "UNAVAILABLE")


def test_what_was_said_counts_more_than_what_grpc_makes_of_it() -> None:
    """grpc's own words take the place of details where the stream's reset overtakes them."""
    info = error_details_pb2.ErrorInfo(reason="EMPTY_PROMPT", domain="radixmesh")
    status = status_pb2.Status(code=3, message="send at least one token")
    status.details.add().Pack(info)
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), trailers, details="Stream removed"
    )
    error = mesh_error_from_rpc(failure)
    assert (error.reason_name, error.message) == ("EMPTY_PROMPT", "send at least one token")


def test_broken_details_do_not_hide_the_status() -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = mesh_error_from_rpc(
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="x")
    )
    assert error.reason_name == "NO_REPLICA"
