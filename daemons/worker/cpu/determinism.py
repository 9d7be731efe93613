"""Finds the tile sizes in which this machine computes this model's rows to the same bits."""

from __future__ import annotations

import time

import torch

from radixmesh.daemons.runtime.logs import get_logger
from radixmesh.daemons.worker.models.model import Model, RowProbe
from radixmesh.daemons.worker.tiles import RowTiles, agreeing_sizes

_log = get_logger(__name__)

# One row alone is a matrix-vector product, which adds in another order and is not faster than two rows.
_CANDIDATES = (2, 4, 8, 16, 32, 64, 128)
_PROBE_ROWS = 16


def verified_tiles(model: Model, device: torch.device) -> RowTiles:
    """Tiles that keep a row's bits, by trial of every kind of row function with the model's own weights.

    Usually very tall tiles add in another order than the others. If no
    set of sizes serves all functions, rows are computed one by one, with a warning: slow, and right by construction.
    """
    started = time.monotonic()
    candidates: tuple[int, ...] = _CANDIDATES
    for probe in model.row_probes():
        agreeing = agreeing_sizes(probe.function, _probe_rows(probe, device), candidates)
        if not agreeing:
            _log.warning("row_tiles_not_verified", function=probe.name, tried=candidates, fallback="one row at a time")
            return RowTiles((1,))
        candidates = agreeing
    _log.info("row_tiles_verified", sizes=candidates, seconds=round(time.monotonic() - started, 3))
    return RowTiles(candidates)


def _probe_rows(probe: RowProbe, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(_PROBE_ROWS, *shape, generator=generator).to(device, dtype) for shape, dtype in probe.inputs
    )
