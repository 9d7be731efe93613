"""Names of implementations, each made by a creator that imports it only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one seam by name. `kind` is what error messages call them ("attention backend")."""

    def __init__(self, kind: str, creators: Mapping[str, Callable[[], T]]) -> None:
        self._kind = kind
        self._creators = dict(creators)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._creators))

    def create(self, name: str) -> T:
        """Raises MeshError UNSUPPORTED, listing the known names, for one that is not there."""
        if name not in self._creators:
            raise MeshError(
                common_pb2.ERROR_REASON_UNSUPPORTED,
                f"unknown {self._kind} {name!r}; known: {', '.join(self.names)}",
                {"name": name, "known": ",".join(self.names)},
            )
        return self._creators[name]()
