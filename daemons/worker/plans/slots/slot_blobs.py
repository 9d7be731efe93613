"""The blobs that slots name: pinned from admit to release. One that is not here fails its slot alone."""

from __future__ import annotations

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit, SlotError
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore


class SlotBlobs:
    """Used by the step thread, in plan order. store None: no slot names a blob."""

    def __init__(self, store: BlobStore | None) -> None:
        self._store = store
        self._hashes: dict[int, str] = {}
        self.failed: dict[int, SlotError] = {}
        """Slots whose request cannot go on, until their release."""
        self._untold: list[SlotError] = []

    def begin_epoch(self) -> None:
        """All slots are free; what was put for them is kept for nobody any more."""
        for slot in list(self._hashes):
            self.released(slot)
        self.failed.clear()
        self._untold.clear()
        if self._store is not None:
            self._store.begin_epoch()

    def admitted(self, admit: Admit) -> bytes:
        """Pins the grammar of a request in a slot, and returns it; empty where it has none, or it is not here."""
        if not admit.grammar_hash or self._store is None:
            return b""
        try:
            data = self._store.pin(admit.grammar_hash)
        except MeshError as error:
            self.fail(admit.slot, admit.generation, error)
            return b""
        self._hashes[admit.slot] = admit.grammar_hash
        return data

    def fail(self, slot: int, generation: int, error: MeshError) -> None:
        """The request in a slot cannot go on: its rows have no token from here on. Told once."""
        if slot not in self.failed:
            failed = self.failed[slot] = SlotError(slot=slot, generation=generation, error=error)
            self._untold.append(failed)

    def released(self, slot: int) -> None:
        """The slot is free."""
        self.failed.pop(slot, None)
        blob_hash = self._hashes.pop(slot, None)
        if blob_hash is not None and self._store is not None:
            self._store.unpin(blob_hash)

    def take_errors(self) -> tuple[SlotError, ...]:
        """Errors that no result has told yet."""
        if not self._untold:
            return ()
        errors, self._untold = tuple(self._untold), []
        return errors
