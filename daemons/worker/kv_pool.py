"""The KV memory of a worker: pages of a fixed number of tokens, for all layers."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import WHOLE_KV, KvShare
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_transfer.staging import CHUNK_TOKENS
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane, KvPlanes
from radixmesh.kernels.kv_fp8 import KvScales

if TYPE_CHECKING:
    from radixmesh.kernels.kv_copy import RowCopies

_log = get_logger(__name__)

# A pool of default size takes this share of the memory that is free, and no more than that many full contexts: beyond,
# bookkeeping per page costs more than a larger cache brings.
_MEMORY_SHARE = 0.25
_MOST_CONTEXTS = 32
# Parts of a token's heads whose copies are kept ready: other workers choose them.
_MOST_PARTS = 64


class KvPool(KvPlanes):
    """Planes of [layers, pages + 1, page_size, *row_shape]; token t of page p is number p x page_size + t of a layer.

    The page after the last is never granted and holds zeros: what attention reads where a sequence has no key. So does
    the layout's padding, in all pages. scales: by layer, of keys and values in a pool of FP8; None: all are 1.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KvScales] | None = None,
        share: KvShare | None = None,
    ) -> None:
        """share: heads of this rank; None: all."""
        assert scales is None or len(scales) == layout.num_layers, (len(scales), layout.num_layers)
        self._scales = scales
        self.is_whole = layout.is_whole
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype_name = str(dtype).removeprefix("torch.")
        planes = ";".join(
            f"{plane.name}{list(plane.row_shape)}+{plane.padding}{plane.form}".replace(" ", "")
            for plane in layout.planes
        )
        self.layout_name = f"layers={layout.num_layers};page={page_size};{planes}"
        """Fingerprint of how a page lies in memory: of layers, page size, and the planes with padding and form."""
        self.token_bytes = layout.num_layers * dtype.itemsize * sum(math.prod(p.row_shape) for p in layout.planes)
        """Bytes that read_tokens() gives for each token."""
        sizes_of_heads = {plane.row_shape[0] if len(plane.row_shape) > 1 else 0 for plane in layout.planes}
        num_heads = sizes_of_heads.pop() if len(sizes_of_heads) == 1 else 0
        self.share = share or (KvShare(0, num_heads, num_heads) if num_heads else WHOLE_KV)
        """Heads that the planes hold; planes of different ones are not divided."""
        assert self.share == WHOLE_KV or self.share.size == num_heads, (self.share, layout.planes)
        rows = ";".join(f"{p.name}{self._row_of_all(p)}{p.form}".replace(" ", "") for p in layout.planes)
        self.token_layout_name = f"layers={layout.num_layers};{rows}"
        """Fingerprint of what read_tokens() gives for each token, of all heads: those of ranks are parts of it."""
        try:
            stored = {
                plane.name: torch.empty(
                    layout.num_layers, num_pages + 1, page_size, *plane.stored_shape, dtype=dtype, device=device
                )
                for plane in layout.planes
            }
        except RuntimeError as error:
            size = (num_pages + 1) * page_size * layout.bytes_per_token(dtype)
            raise MeshError(
                common_pb2.ERROR_REASON_INVALID_ARGUMENT,
                f"{num_pages} pages of {page_size} tokens need {size} bytes of KV memory, which cannot be had: "
                "set fewer pages",
                {"field": "num_pages"},
            ) from error
        sizes = {plane.name: plane.row_shape[-1] for plane in layout.planes}
        self._stored = stored
        self.planes = {name: plane[..., : sizes[name]] for name, plane in stored.items()}
        self.token_views = {
            (name, layer): plane[layer].flatten(0, 1)[..., : sizes[name]]
            for name, plane in stored.items()
            for layer in range(layout.num_layers)
        }
        self.copied = [plane.flatten(1, 2) for plane in self.planes.values()]
        self._copies_of: dict[tuple[int | None, int | None], RowCopies] = {}
        """By heads: first and last."""
        self.has_kernels = device.type == "cuda" and all(plane[0, 0].is_contiguous() for plane in self.copied)
        for name, plane in stored.items():
            plane[:, num_pages] = 0
            plane[..., sizes[name] :] = 0

    @property
    def zero_slot(self) -> int:
        """Number of a token that holds zeros."""
        return self.num_pages * self.page_size

    @property
    def plane_names(self) -> tuple[str, ...]:
        """Of the layout."""
        return tuple(self.planes)

    def tokens(self, plane: str, layer: int) -> torch.Tensor:
        return self.token_views[plane, layer]

    def scales(self, layer: int) -> KvScales | None:
        return None if self._scales is None else self._scales[layer]

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of a page, in all layers and planes."""
        for plane in self.planes.values():
            plane[:, target, :num_tokens] = plane[:, source, :num_tokens]

    def copy_tokens(self, source: slice, target: slice) -> None:
        """Copies tokens, by their numbers in the pool, in all layers and planes; the two do not overlap."""
        for view in self.token_views.values():
            view[target] = view[source]

    def token_planes(self) -> list[torch.Tensor]:
        """All planes as [layers, tokens, ...], with padding: the same memory, of which a layer's is contiguous."""
        return [plane.flatten(1, 2) for plane in self._stored.values()]

    def move_tokens(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies tokens, int64 numbers of the pool, in all layers and planes: all are read before any is written."""
        for view in self.token_views.values():
            rows = view.view(torch.uint8)
            rows[targets] = rows[sources]

    def read_tokens(self, indexes: torch.Tensor, part: KvShare | None = None) -> torch.Tensor:
        """KV of tokens, int32 numbers of the pool, as uint8: in chunks of CHUNK_TOKENS, of each the rows of plane after
        plane, layer after layer. part: heads of `share`, None: all of them."""
        data = torch.empty(len(indexes) * self.part_bytes(part), dtype=torch.uint8, device=indexes.device)
        if self.has_kernels:
            self._copies(part).gather(indexes, data)
            return data
        for piece, chunk in self._chunks(indexes, data):
            rows = [view[:, self._heads(part)].view(torch.uint8)[chunk].flatten() for view in self.token_views.values()]
            piece.copy_(torch.cat(rows))
        return data

    def write_tokens(self, indexes: torch.Tensor, data: torch.Tensor, part: KvShare | None = None) -> None:
        """Writes what read_tokens() gave of as many tokens and heads, from this pool or from one with rows alike."""
        if self.has_kernels:
            self._copies(part).scatter(indexes, data)
            return
        for piece, chunk in self._chunks(indexes, data):
            start = 0
            for view in self.token_views.values():
                rows = view[:, self._heads(part)].view(torch.uint8)
                num = len(chunk) * math.prod(rows.shape[1:])
                rows[chunk] = piece[start : start + num].view(len(chunk), *rows.shape[1:])
                start += num

    @property
    def copies_by_address(self) -> bool:
        """True if there are gather_to() and scatter_from()."""
        return self.has_kernels or self.copied[0].device.type == "cpu"

    def gather_to(self, indexes: torch.Tensor, address: int, part: KvShare | None = None) -> None:
        """read_tokens() to memory that this pool's device reaches, and no tensor has: another device's, for one."""
        if not self.has_kernels:
            data = self.read_tokens(indexes, part)
            _bytes_at(address, len(data)).copy_(data)
            return
        self._copies(part).gather(indexes, address)

    def scatter_from(self, indexes: torch.Tensor, address: int, part: KvShare | None = None) -> None:
        """write_tokens() of memory as of gather_to()."""
        if not self.has_kernels:
            self.write_tokens(indexes, _bytes_at(address, len(indexes) * self.part_bytes(part)), part)
            return
        self._copies(part).scatter(indexes, address)

    def part_bytes(self, part: KvShare | None) -> int:
        """Bytes of a token in read_tokens()."""
        return self.token_bytes if part is None else self.token_bytes // self.share.size * part.size

    def _copies(self, part: KvShare | None) -> RowCopies:
        heads = self._heads(part)
        copies = self._copies_of.get((heads.start, heads.stop))
        if copies is None:
            # Imported where there is a GPU: other machines need no Triton.
            from radixmesh.kernels.kv_copy import RowCopies

            if len(self._copies_of) >= _MOST_PARTS:
                self._copies_of.clear()
            copies = RowCopies([plane[:, :, heads] for plane in self.copied])
            self._copies_of[heads.start, heads.stop] = copies
        return copies

    def _heads(self, part: KvShare | None) -> slice:
        """Of a row of this pool."""
        assert part is None or self.share.has(part), (self.share, part)
        if part is None or part == self.share:
            return slice(None)
        return slice(part.start - self.share.start, part.stop - self.share.start)

    def _row_of_all(self, plane: KvPlane) -> list[int]:
        """A token's row of all heads of the model."""
        return list(plane.row_shape) if self.share == WHOLE_KV else [self.share.total, *plane.row_shape[1:]]

    def _chunks(self, indexes: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes and tokens, int64, of each chunk."""
        token_bytes = len(data) // max(1, len(indexes))
        for start in range(0, len(indexes), CHUNK_TOKENS):
            chunk = indexes[start : start + CHUNK_TOKENS].long()
            yield data[start * token_bytes : (start + len(chunk)) * token_bytes], chunk

    def page_planes(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Pages of all planes and layers, as ArrayHostPool takes them, of a pool on the CPU."""
        return {
            f"{name}.{layer}": plane[layer].view(torch.uint8).reshape(self.num_pages + 1, -1).numpy()
            for name, plane in self._stored.items()
            for layer in range(plane.shape[0])
        }

    def page_words(self) -> dict[str, torch.Tensor]:
        """All planes as int32 [layers, pages + 1, words of a page], the same memory, padding included. Raises
        UNSUPPORTED where a page of a layer is no whole number of words."""
        words = {}
        for name, plane in self._stored.items():
            num_layers, page_bytes = plane.shape[0], plane[0, 0].numel() * plane.element_size()
            if page_bytes % 4:
                message = f"a page of {name} has {page_bytes} bytes a layer: set a larger --page-size"
                raise MeshError(common_pb2.ERROR_REASON_UNSUPPORTED, message, {"feature": "host_tier"})
            flat = plane.view(torch.uint8).reshape(-1).view(torch.int32)
            words[name] = flat.view(num_layers, self.num_pages + 1, page_bytes // 4)
        return words

    def clear(self) -> None:
        """Fills all pages with NaN, so that whatever reads a token that was not written shows it."""
        for plane in self.planes.values():
            plane[:, : self.num_pages] = float("nan")


def rows_of_pages(tokens_NF: torch.Tensor, pool: KvPool) -> torch.Tensor:
    """Numbers of tokens by page, uint8 [pages + 1, bytes of a page], the same memory. tokens_NF: those of the pool's
    pages first."""
    num_pages = pool.num_pages + 1
    return tokens_NF[: num_pages * pool.page_size].view(torch.uint8).view(num_pages, -1)


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """Memory of the host, uint8."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def kv_slots(pages: IntArray, length: int, page_size: int) -> npt.NDArray[np.int64]:
    """Numbers of the tokens of a pool that hold the KV of positions [0, length) of a sequence with these pages."""
    chosen = pages[: -(-length // page_size)].astype(np.int64)
    if page_size == 1:
        return chosen
    return (chosen[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]


def latents_in_fp8() -> MeshError:
    """Refusal of a pool of FP8 for a model that caches latents, which no kernel reads yet."""
    return MeshError(
        common_pb2.ERROR_REASON_UNSUPPORTED,
        "kv_dtype fp8 is for keys and values, not yet for the latents of multi-head latent attention: choose "
        "--kv-dtype auto for this model",
        {"field": "kv_dtype"},
    )


def default_num_pages(
    layout: KvLayout, *, page_size: int, dtype: torch.dtype, max_total_len: int, num_ranks: int = 1
) -> int:
    """Pages for the smaller of a share of the free memory and some full contexts, at least one full context.

    num_ranks: how many workers divide that share among them.
    """
    available = available_bytes()
    by_memory = int(available * _MEMORY_SHARE / num_ranks) // layout.bytes_per_token(dtype)
    one_context = -(-max_total_len // page_size)
    num_pages = max(min(by_memory, _MOST_CONTEXTS * max_total_len) // page_size, one_context)
    fields = {
        "num_pages": num_pages,
        "page_size": page_size,
        "kv_bytes": num_pages * page_size * layout.bytes_per_token(dtype),
        "available_bytes": available,
    }
    if by_memory < max_total_len:
        _log.warning("kv_pool_larger_than_its_share", share=_MEMORY_SHARE, **fields)
    else:
        _log.info("kv_pool_sized", **fields)
    return num_pages


def available_bytes() -> int:
    """Memory that can be had without swapping, and without passing the limit of this process's container."""
    bounds = [free_bytes(), container_bytes()]
    return max(0, min(bound for bound in bounds if bound is not None))


def free_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Systems without that file: free memory, not counting what caches would give back.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_bytes() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(current)
