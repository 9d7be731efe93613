"""Errors of the client, by what a caller can do about them. Every error carries the mesh's own reason."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc

_DETAILS_KEY = "grpc-status-details-bin"
# Without an ErrorInfo these come from the transport: the router died, was restarted, or a proxy hung up.
_TRANSPORT_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


class RadixMeshError(Exception):
    """Base of all errors. reason: name of the ErrorReason, e.g. "EMPTY_PROMPT". metadata: see common.proto."""

    def __init__(self, message: str, reason: str = "INTERNAL", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata: Mapping[str, str] = dict(metadata or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.reason})"


class InvalidRequestError(RadixMeshError, ValueError):
    """The request is wrong: sending it again gives the same answer."""


class NotFoundError(RadixMeshError):
    """No such model or request."""


class AuthenticationError(RadixMeshError):
    """The API key is missing, unknown, or not for this verb."""


class OverloadedError(RadixMeshError):
    """There is no room now, or never will be for a request of this size (NEVER_FITS)."""

    @property
    def retry_after_s(self) -> float | None:
        """When to try again; None if that cannot help or is not known."""
        asked = self.metadata.get("retry_after_ms")
        return int(asked) / 1000 if asked else None


class UnavailableError(RadixMeshError):
    """Nobody could serve the request for as long as was agreed to wait."""


class DeadlineExceededError(RadixMeshError):
    """The request's own deadline passed."""


class AbortedError(RadixMeshError):
    """Somebody aborted the request, or resumed it elsewhere."""


class ClientStalledError(RadixMeshError):
    """This client read too slowly for too long, and its request was dropped."""


class MismatchError(RadixMeshError):
    """The model is not the one that the stream began with, or daemons of the mesh disagree about it."""


class UnsupportedError(RadixMeshError):
    """The mesh knows the option and does not offer it."""


class BrokenStreamError(RadixMeshError):
    """The router sent a gap or a repetition: a bug."""


_STATUS_TO_CLASS: Mapping[str, type[RadixMeshError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "ALREADY_EXISTS": InvalidRequestError,
    "NOT_FOUND": NotFoundError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": AbortedError,
    "ABORTED": AbortedError,
    "FAILED_PRECONDITION": MismatchError,
    "UNIMPLEMENTED": UnsupportedError,
    "UNAUTHENTICATED": AuthenticationError,
    "PERMISSION_DENIED": AuthenticationError,
}


def error_from_mesh(error: MeshError) -> RadixMeshError:
    """The exception for an error of the mesh."""
    kind = _STATUS_TO_CLASS.get(error.status, RadixMeshError)
    if error.reason == common_pb2.ERROR_REASON_CLIENT_STALLED:
        kind = ClientStalledError
    return kind(error.message, error.reason_name, error.metadata)


def error_from_proto(error: common_pb2.Error) -> RadixMeshError:
    """The exception for an error within a message."""
    return error_from_mesh(MeshError.from_proto(error))


def error_from_rpc(error: grpc.RpcError) -> RadixMeshError:
    """The exception for a failed call."""
    return error_from_mesh(mesh_error_from_rpc(error))


def is_transport_error(error: grpc.RpcError) -> bool:
    """True if the connection failed rather than the request."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() not in _TRANSPORT_CODES:
        return False
    return all(key != _DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def is_retriable(error: RadixMeshError) -> bool:
    """True if another router, or the same one a little later, may take the request."""
    return isinstance(error, UnavailableError)
