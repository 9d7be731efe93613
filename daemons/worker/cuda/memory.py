"""Number of KV pages that fit a GPU beside the weights, and errors that say why something does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.model.device_model import LoadedModel

log = get_logger(__name__)

_MOST_CONTEXTS = 2
# Kernels' own memory, libraries' workspaces, fragmentation.
_SPARE_BYTES = 1536 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """mem_fraction: share of the device's memory that weights, work space and KV take together. graph_rows,
    prompt_rows: sizes of the steps that are captured, of decodes and with chunks. attention_bytes: what attention keeps
    beside the pages. others_rows: of other ranks' steps, as many as may come to the experts of this one."""

    mem_fraction: float
    num_pages: int | None
    page_size: int
    num_slots: int
    max_tokens_per_step: int
    max_total_len: int
    graph_rows: tuple[int, ...] = ()
    prompt_rows: tuple[int, ...] = ()
    attention_bytes: int = 0
    others_rows: int = 0


def choose_num_pages(settings: MemorySettings, model: LoadedModel, token_bytes: int, device: torch.device) -> int:
    """Pages that fit, of `token_bytes` a token; those asked for if they do. dtype: of weights and activations.

    Raises MeshError INVALID_ARGUMENT naming the flag to change.
    """
    free, total = torch.cuda.mem_get_info(device)
    work = work_bytes(settings, model)
    page_bytes = settings.page_size * token_bytes
    budget = int(settings.mem_fraction * total) - (total - free) - work
    fit = max(0, budget) // page_bytes
    fields: dict[str, object] = {
        "total_bytes": total,
        "used_bytes": total - free,
        "work_bytes": work,
        "kv_bytes_per_page": page_bytes,
        "pages_that_fit": fit,
        "mem_fraction": settings.mem_fraction,
    }
    if settings.num_pages is not None:
        if settings.num_pages * page_bytes > free - work:
            raise _does_not_fit(f"{settings.num_pages} KV pages of {page_bytes} bytes", "--num-pages", fields)
        fit = settings.num_pages
    elif fit * settings.page_size < settings.max_total_len:
        raise _does_not_fit(
            f"KV pages for one request of {settings.max_total_len} tokens",
            "--mem-fraction, --max-total-len, --num-slots or --max-tokens-per-step",
            fields,
        )
    else:
        # More than every slot can fill twice over is no larger a cache in practice, and a scheduler counts every page.
        fit = min(fit, _MOST_CONTEXTS * settings.num_slots * -(-settings.max_total_len // settings.page_size))
    log.info("memory_sized", num_pages=fit, **fields)
    return fit


@contextmanager
def fitting(what: str, flags: str) -> Iterator[None]:
    """Turns running out of memory inside into a MeshError that names `what` did not fit and the flags to change."""
    try:
        yield
    except RuntimeError as error:
        # Allocations outside torch's allocator (contexts, libraries) fail with an error of CUDA's.
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        raise _does_not_fit(what, flags, _memory_figures()) from error


def _memory_figures() -> dict[str, object]:
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return {}
    return {"total_bytes": total, "free_bytes": free}


def work_bytes(settings: MemorySettings, model: LoadedModel) -> int:
    """Memory of a step beside weights and KV: rows of activations, logits, tables by slot."""
    rows = settings.max_tokens_per_step * model.row_bytes()
    rows += settings.others_rows * model.expert_row_bytes()
    itemsize = model.dtype.itemsize
    # Logits, and what penalties work in: float32 and counts.
    logits = settings.num_slots * model.vocab_size * (2 * itemsize + 8)
    # Page tables and tokens, int32.
    tables = 8 * (settings.num_slots + 1) * settings.max_total_len
    positions = settings.max_total_len * model.position_bytes()
    # Every graph keeps what it leaves, logits or, with chunks, hidden states, in each of its variants (with a shared
    # prefix, and without).
    left = sum(settings.graph_rows) * model.vocab_size + sum(settings.prompt_rows) * model.hidden_size
    graphs = 2 * left * itemsize
    return rows + logits + graphs + tables + positions + settings.attention_bytes + _SPARE_BYTES


def _does_not_fit(what: str, flags: str, fields: dict[str, object]) -> MeshError:
    figures = ", ".join(f"{name} {value}" for name, value in fields.items()) or "no figures to be had"
    return MeshError(
        ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
        f"{what} do not fit the GPU's memory ({figures}): change {flags}",
        {"field": flags.split(",")[0].removeprefix("--").replace("-", "_")},
    )
