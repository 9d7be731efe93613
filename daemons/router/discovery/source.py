"""The seam of discovery: a source says which addresses there are, again whenever that may have changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator


class SourceError(Exception):
    """A source cannot tell now; the text says why, and what to do."""


class AddressSource(ABC):
    """A list of addresses that somebody else keeps."""

    @abstractmethod
    def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """Whole lists, the first at once; addresses are not checked. Never ends by itself.

        Raises SourceError or OSError where the source cannot be asked or says nonsense; it is called again then.
        """
