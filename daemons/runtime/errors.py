"""The one error type of the mesh, and the table from reason to gRPC status. No grpc: domain code raises these."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import cast

from radixmesh.common.v1 import common_pb2

# Of the contract, and offered by this name: domain code that raises errors needs no protos for it.
from radixmesh.common.v1.common_pb2 import ErrorReason as ErrorReason

_PREFIX = "ERROR_REASON_"
# Of an error that a peer sent.
_MAX_CHARS = 1000
_MAX_VALUES = 16

_STATUS_TO_REASONS: Mapping[str, tuple[str, ...]] = {
    "INVALID_ARGUMENT": (
        "MALFORMED_MESSAGE",
        "MISSING_FIELD",
        "INVALID_ARGUMENT",
        "EMPTY_PROMPT",
        "PROMPT_TOO_LONG",
        "TOKEN_OUT_OF_VOCABULARY",
        "TOO_MANY_STOPS",
        "INVALID_CHAT",
        "INVALID_RESUME",
        "INVALID_GRAMMAR",
    ),
    "NOT_FOUND": ("UNKNOWN_MODEL", "UNKNOWN_REQUEST", "UNKNOWN_BLOB"),
    "ALREADY_EXISTS": ("DUPLICATE_REQUEST",),
    "FAILED_PRECONDITION": (
        "STALE_ATTEMPT",
        "VERSION_MISMATCH",
        "MODEL_MISMATCH",
        "TOKENIZER_MISMATCH",
        "SAMPLER_MISMATCH",
        "PROTOCOL_VIOLATION",
        "EPOCH_FENCED",
        "STEP_GAP",
        "SLOT_CONFLICT",
        "PAGE_CONFLICT",
        "GROUP_GENERATION",
    ),
    "UNIMPLEMENTED": ("UNSUPPORTED",),
    "RESOURCE_EXHAUSTED": ("NEVER_FITS", "OVERLOADED", "JOURNAL_FULL", "BLOB_TOO_LARGE", "TOO_LARGE"),
    "UNAVAILABLE": ("NO_REPLICA", "NOT_SERVING", "GROUP_LOST"),
    "DEADLINE_EXCEEDED": ("DEADLINE_EXCEEDED", "STEP_TIMEOUT"),
    "ABORTED": ("CLIENT_STALLED", "SUPERSEDED", "TRANSFER_FAILED"),
    "CANCELLED": ("ABORTED",),
    # UNSPECIFIED is never sent on purpose: who raises it has a bug, and is reported as such.
    "INTERNAL": ("INTERNAL", "STEP_FAILED", "RANKS_DIVERGED", "UNSPECIFIED"),
    "DATA_LOSS": ("BAD_CHECKPOINT",),
    "OUT_OF_RANGE": ("RESNAPSHOT",),
    "UNAUTHENTICATED": ("UNAUTHENTICATED",),
    "PERMISSION_DENIED": ("PERMISSION_DENIED",),
}
_REASON_TO_STATUS: Mapping[str, str] = {
    reason: status for status, reasons in _STATUS_TO_REASONS.items() for reason in reasons
}


class MeshError(Exception):
    """Something went wrong that a peer has to know of.

    reason: ErrorReason value, also the key of the gRPC status. message: one sentence for a person that says what to do.
    metadata: the details that common.proto names beside the reason; values are text.
    """

    def __init__(self, reason: ErrorReason, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = dict(metadata or {})

    @property
    def reason_name(self) -> str:
        """Name of the reason without its prefix, as it travels in ErrorInfo."""
        return reason_name(self.reason)

    @property
    def status(self) -> str:
        """Name of the gRPC status that carries this error."""
        return status_of(self.reason)

    def to_proto(self) -> common_pb2.Error:
        """The same error as a message, for streams that outlive it."""
        return common_pb2.Error(reason=self.reason, message=self.message, metadata=dict(self.metadata))

    @classmethod
    def from_proto(cls, error: common_pb2.Error) -> MeshError:
        """The error that a message carries. A reason that this version does not know is kept as its number.

        It is logged and handed on, whoever sent it: what it quotes has an end.
        """
        if not error.reason:
            return cls(
                ErrorReason.ERROR_REASON_INTERNAL, error.message[:_MAX_CHARS] or "a peer failed and gave no reason"
            )
        metadata = {key[:_MAX_CHARS]: error.metadata[key][:_MAX_CHARS] for key in islice(error.metadata, _MAX_VALUES)}
        return cls(error.reason, error.message[:_MAX_CHARS], metadata)

    def __str__(self) -> str:
        details = "".join(f" {key}={value}" for key, value in self.metadata.items())
        return f"{self.reason_name}: {self.message}{f' [{details[1:]}]' if details else ''}"

    def __repr__(self) -> str:
        return f"MeshError({self!s})"


def reason_name(reason: ErrorReason) -> str:
    """Name of a reason without its prefix; a number that this version does not know as "UNKNOWN_<number>"."""
    if reason not in ErrorReason.values():
        return f"UNKNOWN_{int(reason)}"
    return ErrorReason.Name(reason).removeprefix(_PREFIX)


def reason_of(name: str) -> ErrorReason | None:
    """The reason of that name (without prefix), None if this version does not know it."""
    try:
        return cast("ErrorReason", ErrorReason.Value(_PREFIX + name))
    except ValueError:
        return None


def status_of(reason: ErrorReason) -> str:
    """Name of the gRPC status for a reason; a reason of a newer version is UNKNOWN."""
    return _REASON_TO_STATUS.get(reason_name(reason), "UNKNOWN")
