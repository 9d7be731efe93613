"""Finds the tile sizes in which this machine computes this model's rows to the same bits."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.models.model import RowProbe
from radixmesh.daemons.worker.ranks.group import Group
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted
from radixmesh.daemons.worker.tiles import RowFunction, RowTiles, agreeing_sizes, sizes_agree

_log = get_logger(__name__)

# One row alone is a GEMV, which adds in another order and is not faster than two rows.
_CANDIDATES = (2, 4, 8, 16, 32, 64, 128)
# Another order of additions shows in many numbers of a row, but a row of a router's result may have two of them: as
# many rows as give so many numbers, within limits.
_PROBE_NUMBERS = 4096
_PROBE_ROWS = (16, 512)


def verified_tiles(probes: Sequence[RowProbe], device: torch.device) -> RowTiles:
    """Tiles that keep a row's bits, by running every row function of a model with the model's own weights.

    The first function of a name is tried in full, the others of that name (other layers, other experts) in the sizes
    that are left. Usually very short and very tall tiles add in another order than the others. A function that no
    set of sizes serves is run one row at a time, with a warning: slow, and right by construction.
    """
    started = time.monotonic()
    sizes: tuple[int, ...] = _CANDIDATES
    row_by_row: list[RowProbe] = []
    tried: set[str] = set()
    for probe in probes:
        rows = _probe_rows(probe, device)
        if probe.name in tried and sizes_agree(probe.function, rows, sizes):
            continue
        tried.add(probe.name)
        agreeing = agreeing_sizes(probe.function, rows, sizes)
        if agreeing:
            sizes = agreeing
        else:
            row_by_row.append(probe)
    if row_by_row:
        _log.warning(
            "row_tiles_not_verified",
            functions=sorted({probe.name for probe in row_by_row}),
            num_functions=len(row_by_row),
            tried=_CANDIDATES,
            fallback="one row at a time",
        )
    if len(row_by_row) == len(probes):
        return RowTiles((1,))
    _log.info(
        "row_tiles_verified",
        sizes=sizes,
        num_functions=len(probes) - len(row_by_row),
        seconds=round(time.monotonic() - started, 3),
    )
    return RowTiles(sizes, [probe.function for probe in row_by_row])


def common_tiles(tiles: RowTiles, functions: Sequence[RowFunction], group: Group) -> RowTiles:
    """Tiles that all ranks of a group have verified, so that they meet in collectives with the same rows.

    functions: of the probes of the model, in the same order on every rank. A function that one rank runs row by row is
    run so by all; others stay as they are here. A set of sizes stays verified where some are left out.

    Raises CollectiveAborted if the ranks have not as much to say: they are of different builds.
    """
    own = [tiles.sizes is None, *(size in (tiles.sizes or ()) for size in _CANDIDATES)]
    own += [function in tiles.row_by_row for function in functions]
    # gloo ends the process where a collective is of other shapes than the others', or leaves what is missing unwritten.
    numbers = group.all_gather(torch.tensor([len(own)]), [1] * group.size).tolist()
    if set(numbers) != {len(own)}:
        raise CollectiveAborted(f"the ranks are not of one build, their row functions are {numbers}: start one on all")
    told = group.all_gather(torch.tensor(own, dtype=torch.int64), [len(own)] * group.size)
    by_rank = told.view(group.size, len(own)).bool()
    if by_rank[:, 0].any():
        return RowTiles(None)
    sizes_of_all = by_rank[:, 1 : 1 + len(_CANDIDATES)].all(dim=0).tolist()
    sizes = [size for size, is_common in zip(_CANDIDATES, sizes_of_all, strict=True) if is_common]
    is_by_row = by_rank[:, 1 + len(_CANDIDATES) :].any(dim=0).tolist()
    if not sizes:
        return RowTiles((1,))
    agreed = {function for function, by_row in zip(functions, is_by_row, strict=True) if by_row}
    return RowTiles(sizes, agreed | (tiles.row_by_row - set(functions)))


def _probe_rows(probe: RowProbe, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Distinct rows of ordinary magnitude, a power of two of them."""
    least, most = _PROBE_ROWS
    outputs = probe.function(_random_rows(probe, least, device))
    numbers = sum(x[0].numel() for x in outputs if x.is_floating_point())
    rows = least
    while rows < most and rows * numbers < _PROBE_NUMBERS:
        rows *= 2
    return _random_rows(probe, rows, device)


def _random_rows(probe: RowProbe, num_rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(num_rows, *shape, generator=generator).to(device, dtype) for shape, dtype in probe.inputs)
