"""Upper bound of the memory of FlashInfer's plans: its allocator refuses a plan for which there is too little."""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelConfig, KernelKind, Workspace

_FLOAT = 4
_INT = 4
_SPARE = 4096
# Blocks of decode that a multiprocessor can hold; FlashInfer asks the driver for the number.
_BLOCKS_PER_SM = 32
_SPLIT_BLOCKS_PER_SM = 2
_HOPPER_TILE = 128
# Beyond so many pieces of work a head, Hopper's plan has one list for all heads.
_HOPPER_LIST = 4096
_HOPPER_ARRAYS = 7


def allocate_workspace(
    kind: KernelKind, config: KernelConfig, device: torch.device, *, max_rows: int, max_queries: int, longest: int = 1
) -> Workspace:
    """For plans of up to `max_rows` rows with up to `max_queries` queries together.

    longest: queries of a row, at most, that graphs' plans are told of.
    """
    floats, ints = workspace_bytes(
        kind, config, num_sms_of(device), max_rows=max_rows, max_queries=max_queries, longest=longest
    )
    return Workspace(
        floats=torch.empty(floats, dtype=torch.uint8, device=device),
        ints=torch.empty(ints, dtype=torch.uint8, device=device),
    )


def workspace_bytes(
    kind: KernelKind, config: KernelConfig, num_sms: int, *, max_rows: int, max_queries: int, longest: int = 1
) -> tuple[int, int]:
    """Bytes of `Workspace.floats` and of `Workspace.ints`."""
    shape = config.shape
    if kind is KernelKind.HOPPER:
        per_head = -(-max_queries // _HOPPER_TILE) + max_rows
        pieces = max(per_head, min(per_head, _HOPPER_LIST) * shape.num_heads)
        return _SPARE, _INT * (_HOPPER_ARRAYS * pieces + num_sms) + _SPARE
    if kind is KernelKind.CUDA_CORES:
        tile, pieces = 1, max(max_rows, _BLOCKS_PER_SM * num_sms // shape.num_kv_heads)
    else:
        # In graphs the tile follows the longest row, elsewhere the mean: tiles of 16 are the most in number, and those
        # of 128 the largest, of which no more than a few blocks a multiprocessor are split.
        tile = _tile(shape.group_size * longest) if config.in_graphs else 128
        smallest = tile if config.in_graphs else 16
        pieces = max(
            _SPLIT_BLOCKS_PER_SM * num_sms // shape.num_kv_heads,
            -(-max_queries * shape.group_size // smallest) + max_rows,
        )
    split = pieces if config.in_graphs else min(pieces, _SPLIT_BLOCKS_PER_SM * num_sms // shape.num_kv_heads)
    floats = _FLOAT * shape.num_heads * split * tile * (shape.head_dim + 1)
    ints = (3 * _INT + 1) * pieces + _INT * (max_rows + max_queries)
    return floats + _SPARE, ints + _SPARE


def num_sms_of(device: torch.device) -> int:
    """Multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile(length: int) -> int:
    """Rows (queries x heads of a group) of a tile for so many of them."""
    return 16 if length <= 16 else 64 if length <= 64 else 128
