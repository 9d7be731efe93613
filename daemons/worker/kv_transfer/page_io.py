"""Copies from KV pages to staging memory. On the step thread: between two steps, or on a stream beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, TokenNumbers
from radixmesh.daemons.worker.kv_transfer.staging import CHUNK_TOKENS, STAMP_BYTES, chunks_of
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.step_handle import DeviceEvent

_COPY_BYTES = 64 << 20


def gather(
    executor: StepExecutor, pages: IntArray, generations: IntArray, tokens: range, memory: ByteArray, part: KvShare
) -> None:
    """Copies heads of tokens of consecutive pages, int32, counted from the first page on, to memory, as they lie in a
    region.

    Raises PAGE_CONFLICT for a page that does not hold what the caller takes it for.
    """
    _check_source(executor, pages, generations, tokens)
    runner, size = executor.runner, executor.limits.page_size
    token_bytes = runner.kv_part_bytes(part)
    for chunk in chunks_of(len(tokens), token_bytes, tokens_at_a_time(token_bytes)):
        data = runner.read_kv(token_indexes(pages, tokens.start + chunk.first, chunk.num, size), part)
        start = chunk.offset - STAMP_BYTES
        memory[start : start + chunk.num * token_bytes] = data


class Gathering(NamedTuple):
    """A gather that was launched. computed: the event of the step that computes its tokens. check: on the step thread,
    once that is done; raises PAGE_CONFLICT for pages that do not hold what the caller takes them for."""

    copied: Copied
    computed: DeviceEvent
    check: Callable[[], None]


def begin_gather(
    executor: StepExecutor,
    pages: IntArray,
    generations: IntArray,
    tokens: range,
    target: DevicePiece,
    part: KvShare,
    after_step: int = 0,
    *,
    numbers: TokenNumbers | None = None,
    tail: bytes = b"",
) -> Gathering:
    """As gather(), to memory of the device, and `tail` behind it. after_step: was launched, and computes the last of
    the tokens; 0: they are computed. Steps that are launched later may be granted the pages: they wait for the copy.
    numbers: of the tokens in the pool, where these are part of others; None: only these are copied."""
    _check_granted(executor, pages, generations, tokens)
    device, host = executor.runner.kv_device, executor.host
    num_bytes = len(tokens) * executor.runner.kv_part_bytes(part) + len(tail)
    assert device is not None and target.num_bytes == num_bytes, target
    computed = executor.event_of(after_step)
    if numbers is None:
        numbers = TokenNumbers(token_indexes(pages, tokens.start, len(tokens), executor.limits.page_size))
    copied = device.gather(numbers, target, part, computed, tail=tail)
    if host is not None:
        # Loads to these pages wait for all that was launched.
        host.written_beside(pages)
        device.overwritten(pages)

    def check() -> None:
        try:
            executor.settle(after_step)
        except Exception as error:
            raise _conflict("the step that computes pages to be sent has died: prefill again") from error
        _check_source(executor, pages, generations, tokens)

    return Gathering(copied, computed, check)


def _check_granted(executor: StepExecutor, pages: IntArray, generations: IntArray, tokens: range) -> None:
    size = executor.limits.page_size
    if len(pages) != len(generations) or len(pages) != -(-tokens.stop // size) or not are_pages(executor, pages):
        raise _conflict(f"{len(pages)} pages do not hold {len(tokens)} tokens: name those of the tokens, in order")
    if (executor.records.generations[pages] != generations).any():
        raise _conflict("a page to be sent was granted anew: prefill again")


def _check_source(executor: StepExecutor, pages: IntArray, generations: IntArray, tokens: range) -> None:
    _check_granted(executor, pages, generations, tokens)
    size = executor.limits.page_size
    held = executor.records.filled[pages].astype(np.int64)
    held[-1] += len(pages) * size - tokens.stop
    if (held < size).any():
        raise _conflict("a page to be sent is not computed to its end: prefill again")


def tokens_at_a_time(token_bytes: int) -> int:
    """Whole chunks whose copy on the device takes little of its memory."""
    return max(1, _COPY_BYTES // (token_bytes * CHUNK_TOKENS)) * CHUNK_TOKENS


def token_indexes(pages: IntArray, first: int, num: int, page_size: int) -> IntArray:
    """int32 numbers of tokens in the pool, of those from `first` on that the pages hold."""
    if page_size == 1:
        of_pages: IntArray = pages[first : first + num].copy()
        return of_pages
    at = np.arange(first, first + num, dtype=np.int32)
    indexes: IntArray = pages[at // page_size] * np.int32(page_size) + at % np.int32(page_size)
    return indexes


def are_pages(executor: StepExecutor, pages: IntArray) -> bool:
    """True for at least one page, each of the pool and named once."""
    if not len(pages) or int(pages.min()) < 0 or int(pages.max()) >= executor.limits.num_pages:
        return False
    ordered = np.sort(pages)
    return not bool((ordered[1:] == ordered[:-1]).any())


def _conflict(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_PAGE_CONFLICT, message)
