"""Settings of a worker apart from its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from radixmesh.daemons.runtime.common_settings import PredecessorEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Settings apart from the model. `dump_folder` (None: see PrivateFolder) gets the plans of died steps and
    profiler traces; the file `record_plans`, if one is named, every plan."""

    backend: str
    max_plans_in_flight: int
    max_blob_bytes: int
    blob_store_bytes: int
    dump_folder: Path | None
    record_plans: Path | None = None
    transfer_staging_bytes: int = 0
    """KV on its way to and from other workers; 0: there are no transfers."""
    transfer_piece_bytes: int = 0
    """Of that KV in one copy of the device, at least; 0: all is copied at once."""
    predecessor_end: PredecessorEnd = PredecessorEnd.UNKNOWN
