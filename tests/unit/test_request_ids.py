"""One rule for request ids: what gRPC takes, HTTP takes, but for the room that HTTP needs for indexes."""

from __future__ import annotations

import msgspec
import pytest

from radixmesh.daemons.router.http.request_types.options import RequestId
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.request_ids import MAX_REQUEST_ID_LEN, check_request_id

GOOD = ["a", "chatcmpl-0123456789abcdef", "!~", '"<>&%/\\', "x" * 240]
BAD = ["", "a b", "a\n", "\x1b]52;c;aGk=\x07", "\x7f", "\u00e9", "\u202e", "x" * (MAX_REQUEST_ID_LEN + 1), "a\0"]


@pytest.mark.parametrize("value", GOOD)
def test_what_is_taken_is_taken_by_both(value: str) -> None:
    check_request_id(value)
    assert msgspec.convert(value, RequestId) == value


@pytest.mark.parametrize("value", BAD)
def test_what_is_refused_is_refused_by_both(value: str) -> None:
    with pytest.raises(MeshError) as raised:
        check_request_id(value)
    assert raised.value.reason_name == "INVALID_ARGUMENT" and raised.value.metadata["field"] == "request_id"
    assert value not in raised.value.message or not value, "what is refused is not printed either"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, RequestId)


def test_ids_with_the_longest_index_still_keep_the_rule() -> None:
    check_request_id("x" * 240 + "-4095")
