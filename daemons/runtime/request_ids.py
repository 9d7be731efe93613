"""The one rule for request ids, over gRPC and HTTP alike: they travel in headers, logs and terminals."""

from __future__ import annotations

import re

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError

# Printable ASCII without spaces: nothing that a header, a line of a log or a terminal could take for more than text.
_CHARS = "[!-~]"
MAX_REQUEST_ID_LEN = 256
# An HTTP request with several prompts makes one request each: "<id>-<index>".
_MAX_SUFFIX_LEN = 16
# Searched for by the parser of bodies; `$` would let a last line break pass.
HTTP_REQUEST_ID_PATTERN = rf"^{_CHARS}{{1,{MAX_REQUEST_ID_LEN - _MAX_SUFFIX_LEN}}}\Z"

_REQUEST_ID = re.compile(f"{_CHARS}{{1,{MAX_REQUEST_ID_LEN}}}")


def check_request_id(value: str, field: str = "request_id") -> None:
    """Raises INVALID_ARGUMENT unless value is 1 to MAX_REQUEST_ID_LEN characters of printable ASCII without spaces."""
    # The length first: what is too long is not looked at.
    if len(value) > MAX_REQUEST_ID_LEN or _REQUEST_ID.fullmatch(value) is None:
        raise MeshError(
            common_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"{field} has {len(value)} characters: use 1 to {MAX_REQUEST_ID_LEN} of printable ASCII without spaces",
            {"field": field, "min": "1", "max": str(MAX_REQUEST_ID_LEN)},
        )
