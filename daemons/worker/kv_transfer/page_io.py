"""Copies between KV pages and staging memory. On the step thread, between two steps: nothing else touches pages
there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure
from radixmesh.daemons.worker.kv_transfer.staging import CHUNK_TOKENS, STAMP_BYTES, chunks_of, has_stamps
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray
from radixmesh.daemons.worker.plans.arriving_kv import Arriving
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle

_COPY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Pages, int32, that a region's tokens `ids` go to, all of them full.

    generations: that the pages have once they are granted. previous_page: that they continue, -1: none.
    """

    pages: IntArray
    generations: IntArray
    previous_page: int
    ids: IntArray
    namespace: str


class WrittenPart(NamedTuple):
    """A region's bytes, the stamp that they have to carry, and the heads that they are of."""

    memory: ByteArray | DevicePiece
    stamp: bytes
    share: KvShare

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes if isinstance(self.memory, DevicePiece) else len(self.memory)


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
    for chunk in chunks_of(len(tokens), token_bytes, _tokens_at_a_time(token_bytes)):
        data = runner.read_kv(_token_indexes(pages, tokens.start + chunk.first, chunk.num, size), part)
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
) -> Gathering:
    """As gather(), to memory of the device. after_step: was launched, and computes the last of the tokens; 0: they
    are computed. Steps that are launched later may be granted the pages: they wait for the copy."""
    _check_granted(executor, pages, generations, tokens)
    device, host = executor.runner.kv_device, executor.host
    assert device is not None and target.num_bytes == len(tokens) * executor.runner.kv_part_bytes(part), target
    computed = executor.event_of(after_step)
    indexes = _token_indexes(pages, tokens.start, len(tokens), executor.limits.page_size)
    copied = device.gather(indexes, target, part, computed)
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
    if len(pages) != len(generations) or len(pages) != -(-tokens.stop // size) or not _are_pages(executor, pages):
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


def scatter(executor: StepExecutor, target: Target, parts: Sequence[WrittenPart]) -> Failure:
    """Copies the tokens of regions to pages, and says afterwards whether they are what was sent. The regions hold the
    same tokens, of different heads.

    The pages are granted in any case, and their records are empty unless they are.
    """
    if failure := _grant(executor, target, parts):
        return failure
    for part in parts:
        assert not isinstance(part.memory, DevicePiece), "begin_scatter() is for those"
        _write(executor.runner, target.pages, len(target.ids), part.memory, part.share)
    return _finish(executor, target, parts)


def may_scatter(executor: StepExecutor, target: Target, shares: Sequence[KvShare]) -> bool:
    """True if scatter() of parts of these heads will find nothing wrong with its target, as long as no plan uses the
    pages meanwhile."""
    granted = executor.records.generations
    return (
        _are_free(executor, target)
        and bool((granted[target.pages] + 1 == target.generations).all())
        and _fits(executor, target, shares)
    )


def begin_scatter(
    executor: StepExecutor, target: Target, parts: Sequence[WrittenPart], after_step: int, *, may_be_named: bool = False
) -> StepHandle[tuple[Failure, float]]:
    """As scatter(), of regions in memory of the device or of the host, beside steps later than `after_step`. Also the
    device time that it took, in seconds. may_be_named: plans that come behind this may use the pages, whatever becomes
    of it: they are refused where it fails."""
    try:
        handle = _begin_scatter(executor, target, parts, after_step, may_be_named=may_be_named)
    except BaseException:
        if may_be_named:
            executor.arriving.failed()
        raise
    if may_be_named and handle is None:
        executor.arriving.failed()
    return StepHandle.of((Failure.PAGES, 0.0)) if handle is None else handle


def _begin_scatter(
    executor: StepExecutor, target: Target, parts: Sequence[WrittenPart], after_step: int, *, may_be_named: bool
) -> StepHandle[tuple[Failure, float]] | None:
    """None: the pages, or what is to go there, are not what the caller takes them for."""
    if _grant(executor, target, parts):
        return None
    device, num_tokens = executor.runner.kv_device, len(target.ids)
    assert device is not None
    # Loads from the host wait for steps, not for this.
    after = executor.event_of(after_step) if executor.host is None else None
    copies: list[Copied] = []
    for memory, _, share in parts:
        if not isinstance(memory, DevicePiece):
            _write(executor.runner, target.pages, num_tokens, memory, share)
            continue
        body = memory.part(STAMP_BYTES, memory.num_bytes - 2 * STAMP_BYTES)
        copies.append(
            device.scatter(_token_indexes(target.pages, 0, num_tokens, executor.limits.page_size), body, share, after)
        )

    def collect() -> tuple[Failure, float]:
        for copied in copies:
            copied.event.wait()
        seconds = sum(copied.seconds() for copied in copies)
        # Another epoch may have granted them meanwhile.
        if (executor.records.generations[target.pages] != target.generations).any():
            return Failure.PAGES, seconds
        return _finish(executor, target, parts), seconds

    event, records = copies[-1].event, executor.records
    if not may_be_named:
        return StepHandle(event, collect)

    def collect_named() -> tuple[Failure, float]:
        failure = Failure.PAGES
        try:
            failure, seconds = collect()
        finally:
            if failure is not Failure.NONE:
                records.filled[target.pages[records.generations[target.pages] == target.generations]] = 0
            executor.arriving.over(arriving, is_sound=failure is Failure.NONE)
        return failure, seconds

    def hold() -> None:
        for copied in copies:
            device.hold(copied)

    _record(executor, target)
    copying = StepHandle(event, collect_named)
    executor.arriving.launched(arriving := Arriving(target.pages, copying, hold))
    return copying


def _grant(executor: StepExecutor, target: Target, parts: Sequence[WrittenPart]) -> Failure:
    """Grants the pages. NONE: the parts may be copied to them."""
    records, pages = executor.records, target.pages
    if not _are_free(executor, target):
        return Failure.PAGES
    executor.arriving.granted(pages)
    if executor.host is not None:
        executor.host.written_beside(pages)
    executor.overwritten(pages)
    records.grant(
        pages,
        np.array([len(pages)]),
        previous_pages=np.array([target.previous_page], np.int32),
        namespaces=[target.namespace],
        weights_version=executor.weights_version,
    )
    is_same = bool((records.generations[pages] == target.generations).all())
    is_sound = is_same and _fits(executor, target, [part.share for part in parts])
    return Failure.NONE if is_sound else Failure.PAGES


def _are_free(executor: StepExecutor, target: Target) -> bool:
    """True if the pages are some of the pool that no slot has."""
    is_known = -1 <= target.previous_page < executor.limits.num_pages
    return is_known and _are_pages(executor, target.pages) and not executor.table.page_users[target.pages].any()


def _fits(executor: StepExecutor, target: Target, shares: Sequence[KvShare]) -> bool:
    """True if the tokens fill the pages, are of the vocabulary, and come with all heads."""
    ids, limits = target.ids, executor.limits
    if len(ids) != len(target.pages) * limits.page_size or int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size:
        return False
    return _are_all_heads(executor.runner.kv_share, shares)


def _write(runner: ModelRunner, pages: IntArray, num_tokens: int, memory: ByteArray, share: KvShare) -> None:
    """A region of the host to pages."""
    token_bytes = runner.kv_part_bytes(share)
    for chunk in chunks_of(num_tokens, token_bytes, _tokens_at_a_time(token_bytes)):
        data = memory[chunk.offset : chunk.offset + chunk.num * token_bytes]
        runner.write_kv(_token_indexes(pages, chunk.first, chunk.num, runner.page_size), data, share)


def _finish(executor: StepExecutor, target: Target, parts: Sequence[WrittenPart]) -> Failure:
    """The pages hold what the regions held, whatever that was."""
    # Behind the scatter: a writer that is late would have changed the stamps of another region by now.
    if not all(_has_stamps(executor.runner, part) for part in parts):
        return Failure.STAMP
    _record(executor, target)
    return Failure.NONE


def _record(executor: StepExecutor, target: Target) -> None:
    at, size = np.arange(len(target.ids), dtype=np.int32), executor.limits.page_size
    executor.records.extend(target.pages[at // size], at % np.int32(size), target.ids)


def _has_stamps(runner: ModelRunner, part: WrittenPart) -> bool:
    memory, stamp = part.memory, part.stamp
    if not isinstance(memory, DevicePiece):
        return has_stamps(memory, stamp)
    device, tail = runner.kv_device, memory.address + memory.num_bytes - STAMP_BYTES
    assert device is not None
    return all(device.read(address, STAMP_BYTES) == stamp for address in (memory.address, tail))


def _are_all_heads(share: KvShare, parts: Sequence[KvShare]) -> bool:
    """True if they bring each head of a rank, once."""
    start = share.start
    for part in sorted(parts):
        if part.start != start or not share.has(part):
            return False
        start = part.stop
    return start == share.stop


def _tokens_at_a_time(token_bytes: int) -> int:
    """Whole chunks whose copy on the device takes little of its memory."""
    return max(1, _COPY_BYTES // (token_bytes * CHUNK_TOKENS)) * CHUNK_TOKENS


def _token_indexes(pages: IntArray, first: int, num: int, page_size: int) -> IntArray:
    at = np.arange(first, first + num, dtype=np.int32)
    indexes: IntArray = pages[at // page_size] * np.int32(page_size) + at % np.int32(page_size)
    return indexes


def _are_pages(executor: StepExecutor, pages: IntArray) -> bool:
    """True for at least one page, each of the pool and named once."""
    if not len(pages) or int(pages.min()) < 0 or int(pages.max()) >= executor.limits.num_pages:
        return False
    ordered = np.sort(pages)
    return not bool((ordered[1:] == ordered[:-1]).any())


def _conflict(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_PAGE_CONFLICT, message)
