"""Tenant of a request, and the cached prefixes that it may share: the API key decides, not the request."""

from __future__ import annotations

import hashlib

from radixmesh.daemons.router.requests.intake.resolver import MAX_NAME_BYTES
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.caller import Caller
from radixmesh.router.v1 import router_pb2


def bind_tenant(message: router_pb2.GenerateRequest, caller: Caller, *, shares_cache: bool) -> None:
    """Writes the caller's tenant into a new or resumed request, and the tenant's own name space before its cache salt.

    Who came in with a key can neither claim another tenant nor meet its cached prefixes. Without keys nothing changes.
    shares_cache: the operator wants prefixes shared by all tenants; salts are then what clients say.
    """
    target = message.resume.resolved if message.HasField("resume") else message
    if caller.tenant is not None:
        target.tenant = caller.tenant
    elif not caller.may_name_tenant:
        return
    if not shares_cache:
        target.cache_salt = tenant_salt(target.tenant, target.cache_salt)


def bind_priority(message: router_pb2.GenerateRequest, caller: Caller) -> None:
    """Holds a request's priority to the range of the caller's key: 0 where the key has none.

    Raises PERMISSION_DENIED for a new request beyond it. A resumed one goes on, within what the key allows by now.
    """
    low, high = caller.min_priority, caller.max_priority
    if message.HasField("resume"):
        resolved = message.resume.resolved
        resolved.priority = min(max(resolved.priority, low), high)
        return
    # Unset is the normal priority, or what of the range is nearest to it.
    if not message.priority:
        message.priority = min(max(0, low), high)
    if not low <= message.priority <= high:
        text = (
            f"the API key allows priorities from {low} to {high}, not {message.priority}: leave it out, or ask for it"
        )
        metadata = {"field": "priority", "min": str(low), "max": str(high)}
        raise MeshError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, text, metadata)


def tenant_salt(tenant: str, salt: str) -> str:
    """`salt` within the tenant's name space. A salt that is there already stays: a resumed request brings its own."""
    # Of fixed length, so that no tenant's name and salt together can read as another's.
    space = hashlib.sha256(tenant.encode()).hexdigest()[:32] + ":"
    num_bytes = len(salt.encode())
    # A name that is too long by itself is refused by the checks of the request.
    if salt.startswith(space) or num_bytes > MAX_NAME_BYTES:
        return salt
    if len(space) + num_bytes > MAX_NAME_BYTES:
        salt = hashlib.sha256(salt.encode()).hexdigest()
    return space + salt
