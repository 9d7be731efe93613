"""Pages of a KV pool to and from memory where each lies in one piece: the host's, by a few programs that read and write
it where it lies, or a staging buffer of the device.

L layers, P pages of the device, W words (4 bytes) of a page in one layer and plane, H words of a host page.

A page is scattered over planes and layers of the device, and may be no larger than a token's rows: DMA would take a
copy of some hundred bytes to a few KiB for each. A host page is one piece: plane after plane, layer after layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Words that a program moves at a time, and programs: enough in flight for PCIe (50 GB/s x 2 us is 100 KB), few enough
# to leave the SMs to what computes.
_TILE = 4096
NUM_PROGRAMS = 48


# Numbers of pages differ from call to call: one kernel for all of them, which is compiled once.
@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["device_pages_ptr", "host_pages_ptr"])
def _page_copy_kernel(
    device_ptr, host_ptr, device_pages_ptr, host_pages_ptr, num_pages, num_layers, layer_words, page_words,
    host_page_words, plane_offset, TO_HOST: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    layer_blocks = tl.cdiv(num_layers, LAYERS)
    word_blocks = tl.cdiv(page_words, WORDS)
    num_items = num_pages * layer_blocks * word_blocks
    item = tl.program_id(0)
    while item < num_items:
        index = item // (layer_blocks * word_blocks)
        layer = (item // word_blocks % layer_blocks) * LAYERS + tl.arange(0, LAYERS)[:, None]
        word = (item % word_blocks) * WORDS + tl.arange(0, WORDS)[None, :]
        mask = (layer < num_layers) & (word < page_words)
        device_page = tl.load(device_pages_ptr + index).to(tl.int64)
        host_page = tl.load(host_pages_ptr + index).to(tl.int64)
        device = device_ptr + layer.to(tl.int64) * layer_words + device_page * page_words + word
        host = host_ptr + host_page * host_page_words + plane_offset + layer * page_words + word
        if TO_HOST:
            tl.store(host, tl.load(device, mask=mask, other=0), mask=mask)
        else:
            tl.store(device, tl.load(host, mask=mask, other=0), mask=mask)
        item += tl.num_programs(0)


def copy_pages(
    plane_LPW: torch.Tensor,
    host_H: torch.Tensor,
    device_pages_N: torch.Tensor,
    host_pages_N: torch.Tensor,
    plane_offset: int,
    *,
    to_host: bool,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Copies pages of one plane on the current stream.

    plane_LPW: int32, on the device, layers contiguous. host_H: int32 [host pages, H], pinned or registered memory of
    the host, or memory of the device. device_pages_N, host_pages_N: int32 on the device, ids within the tensors, those
    written to distinct. plane_offset: word of a host page at which the plane begins; plane_offset + L * W <= H.
    """
    num_layers, _, page_words = plane_LPW.shape
    assert plane_LPW.dtype == host_H.dtype == torch.int32, (plane_LPW.dtype, host_H.dtype)
    assert plane_LPW.is_contiguous() and host_H.is_contiguous(), "planes and host pages lie in one piece"
    assert plane_offset + num_layers * page_words <= host_H.shape[1], (plane_offset, plane_LPW.shape, host_H.shape)
    assert len(device_pages_N) == len(host_pages_N), (len(device_pages_N), len(host_pages_N))
    words = min(_TILE, triton.next_power_of_2(page_words))
    layers = min(_TILE // words, triton.next_power_of_2(num_layers))
    num_items = len(device_pages_N) * triton.cdiv(num_layers, layers) * triton.cdiv(page_words, words)
    if not num_items:
        return
    _page_copy_kernel[(min(num_programs, num_items),)](
        plane_LPW, host_H, device_pages_N, host_pages_N, len(device_pages_N), num_layers, plane_LPW.stride(0),
        page_words, host_H.shape[1], plane_offset, TO_HOST=to_host, LAYERS=layers, WORDS=words, num_warps=8,
    )  # fmt: skip


def copy_pages_reference(
    plane_LPW: torch.Tensor,
    host_H: torch.Tensor,
    device_pages_N: torch.Tensor,
    host_pages_N: torch.Tensor,
    plane_offset: int,
    *,
    to_host: bool,
) -> None:
    """As copy_pages, by torch."""
    num_layers, _, page_words = plane_LPW.shape
    device_pages, host_pages = device_pages_N.long(), host_pages_N.long()
    part = slice(plane_offset, plane_offset + num_layers * page_words)
    if to_host:
        rows = plane_LPW[:, device_pages].transpose(0, 1).reshape(len(device_pages), -1)
        host_H[host_pages, part] = rows.to(host_H.device)
    else:
        rows = host_H[host_pages.to(host_H.device), part].to(plane_LPW.device)
        plane_LPW[:, device_pages] = rows.view(len(device_pages), num_layers, page_words).transpose(0, 1)
