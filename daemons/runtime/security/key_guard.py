"""Access by API key. Both servers of the router (HTTP, gRPC) ask it."""

from __future__ import annotations

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.caller import ANYBODY, Caller
from radixmesh.daemons.runtime.security.api_keys import ApiKeys, bearer_key, unauthenticated


class KeyGuard:
    """keys: who may use the mesh; None = everybody. admin_keys: who may also change it; None = nobody if there are
    keys, everybody if there are none."""

    def __init__(self, keys: ApiKeys | None, admin_keys: ApiKeys | None) -> None:
        self._keys = keys
        self._admin_keys = admin_keys

    @property
    def is_open(self) -> bool:
        """True if no key is asked for at all."""
        return self._keys is None and self._admin_keys is None

    def check(self, authorization: str | None, verb: str, *, is_admin: bool = False) -> Caller:
        """The caller. Raises MeshError UNAUTHENTICATED (no key, or an unknown one) or PERMISSION_DENIED (not for this).

        authorization: the header's value. verb: what is called, for the error.
        """
        if self.is_open or (self._keys is None and not is_admin):
            return ANYBODY
        key = bearer_key(authorization)
        caller = self._admin_keys.find(key) if self._admin_keys is not None else None
        if caller is not None:
            return caller
        caller = self._keys.find(key) if self._keys is not None else None
        if caller is None:
            raise unauthenticated("the API key is not one of this router's: check it, or ask for one")
        if is_admin:
            message = f"{verb} changes the mesh and needs a key of --admin-keys-file"
            raise MeshError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message, {"verb": verb})
        return caller
