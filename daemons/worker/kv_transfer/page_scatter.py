"""Copies from staging memory to KV pages. On the step thread: between two steps, or on a stream beside them.

Pages are granted for a transfer, written, and get their records once the stamps were looked at. A scatter may begin
ahead of the writer's last word, with what is there (ScatteredPieces); until its end nobody but the transfer has the
pages, and their records are empty:

  FREE --first piece, or all of it--> GRANTED --copied--> stamps match --> recorded: plans may read them
                                         |                    |
                                         +--given up----------+--> empty, once no copy to them runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, Fetched, TokenNumbers
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure
from radixmesh.daemons.worker.kv_transfer.page_io import are_pages, token_indexes, tokens_at_a_time
from radixmesh.daemons.worker.kv_transfer.staging import STAMP_BYTES, chunks_of, has_stamps
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray
from radixmesh.daemons.worker.plans.arriving_kv import Arriving
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle


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
    return _finish(executor, target, are_sound=_are_stamped(parts))


def may_scatter(executor: StepExecutor, target: Target, shares: Sequence[KvShare]) -> bool:
    """True if scatter() of parts of these heads will find nothing wrong with its target, as long as no plan uses the
    pages meanwhile."""
    granted = executor.records.generations
    return (
        _are_free(executor, target)
        and bool((granted[target.pages] + 1 == target.generations).all())
        and _fits(executor, target, shares)
    )


class ScatteredPieces:
    """Pieces of a commit's regions that were copied to its pages ahead of the last word. after_step: of the epoch,
    behind which the pages are free. shares: heads of the regions."""

    def __init__(
        self, executor: StepExecutor, target: Target, shares: Sequence[KvShare], epoch: int, after_step: int
    ) -> None:
        self._executor, self._target, self._shares = executor, target, shares
        self._epoch, self._after_step = epoch, after_step
        self._numbers: TokenNumbers | None = None
        self.is_granted = False
        """The pages are this transfer's, with the generations of its target."""
        self.num_tokens = [0] * len(shares)
        """Of each region, from the first one on."""
        self.copies: list[Copied] = []
        self._handles: list[StepHandle[None]] = []

    def numbers(self) -> TokenNumbers:
        """Of the target's tokens in the pool, once its pages are granted: they hold its tokens."""
        if self._numbers is None:
            self._numbers = _numbers_of(self._executor, self._target)
        return self._numbers

    def are_pages_ours(self) -> bool:
        """False for pages that were granted by somebody else meanwhile, or that another epoch may grant."""
        granted = self._executor.records.generations[self._target.pages]
        is_same = self._executor.epoch == self._epoch and bool((granted == self._target.generations).all())
        return is_same and _are_free(self._executor, self._target)

    def copy(self, region: int, memory: DevicePiece, end: int) -> bool:
        """Copies the next tokens of a region up to `end`, which are written. False: the pages are not what the caller
        takes them for, and nothing is copied."""
        if self.is_granted:
            if not self.are_pages_ours():
                return False
        elif self._executor.epoch != self._epoch or not may_scatter(self._executor, self._target, self._shares):
            return False
        else:
            _grant_pages(self._executor, self._target)
            self.is_granted = True
        first, executor = self.num_tokens[region], self._executor
        copied = _scatter_tokens(
            executor, self.numbers(), memory, self._shares[region], range(first, end), self._after_step
        )
        self.num_tokens[region] = end
        self.copies.append(copied)

        def collect() -> None:
            copied.event.wait()
            executor.arriving.over(arriving, is_sound=True)

        # Whoever takes the pages meanwhile, by a plan or as the next epoch, waits for the copy.
        self._handles.append(StepHandle(copied.event, collect))
        executor.arriving.launched(
            arriving := Arriving(self._target.pages, self._handles[-1], lambda: _hold(executor, copied))
        )
        return True

    def collect(self) -> None:
        """Waits for all copies so far."""
        while self._handles:
            self._handles.pop().result()


def begin_scatter(
    executor: StepExecutor,
    target: Target,
    parts: Sequence[WrittenPart],
    after_step: int,
    *,
    may_be_named: bool = False,
    pieces: ScatteredPieces | None = None,
) -> StepHandle[tuple[Failure, float]]:
    """As scatter(), of regions in memory of the device or of the host, beside steps later than `after_step`. Also the
    device time that it took, in seconds. may_be_named: plans that come behind this may use the pages, whatever becomes
    of it: they are refused where it fails. pieces: what of it was copied ahead."""
    try:
        handle = _begin_scatter(executor, target, parts, after_step, pieces, may_be_named=may_be_named)
    except BaseException:
        if may_be_named:
            executor.arriving.failed()
        raise
    if may_be_named and handle is None:
        executor.arriving.failed()
    return StepHandle.of((Failure.PAGES, 0.0)) if handle is None else handle


def _begin_scatter(
    executor: StepExecutor,
    target: Target,
    parts: Sequence[WrittenPart],
    after_step: int,
    pieces: ScatteredPieces | None,
    *,
    may_be_named: bool,
) -> StepHandle[tuple[Failure, float]] | None:
    """None: the pages, or what is to go there, are not what the caller takes them for."""
    begun = pieces if pieces is not None and pieces.is_granted else None
    is_granted = _grant(executor, target, parts) is Failure.NONE if begun is None else begun.are_pages_ours()
    if not is_granted:
        return None
    num_tokens = len(target.ids)
    numbers = _numbers_of(executor, target) if pieces is None else pieces.numbers()
    copies: list[Copied] = [] if begun is None else list(begun.copies)
    try:
        for number, (memory, _, share) in enumerate(parts):
            if not isinstance(memory, DevicePiece):
                _write(executor.runner, target.pages, num_tokens, memory, share)
                continue
            rest = range(0 if begun is None else begun.num_tokens[number], num_tokens)
            if rest:
                copies.append(_scatter_tokens(executor, numbers, memory, share, rest, after_step))
        # Behind the scatter: a writer that is late would have changed the stamps of another region by now.
        stamps = _fetched_stamps(executor, parts, copies[-1], after_step)
    except BaseException:
        # Whoever is told of it takes regions and pages for free.
        for copied in copies:
            copied.event.wait()
        raise

    def collect() -> tuple[Failure, float]:
        for copied in copies:
            copied.event.wait()
        if begun is not None:
            begun.collect()
        seconds = sum(copied.seconds() for copied in copies)
        # Another epoch may have granted them meanwhile.
        if (executor.records.generations[target.pages] != target.generations).any():
            return Failure.PAGES, seconds
        return _finish(executor, target, are_sound=_are_stamped(parts, stamps.data())), seconds

    event, records = stamps.event, executor.records
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
            _hold(executor, copied)

    _record(executor, target)
    copying = StepHandle(event, collect_named)
    executor.arriving.launched(arriving := Arriving(target.pages, copying, hold))
    return copying


def _scatter_tokens(
    executor: StepExecutor, numbers: TokenNumbers, memory: DevicePiece, share: KvShare, tokens: range, after_step: int
) -> Copied:
    """Launches the copy of some tokens of a region, from a multiple of CHUNK_TOKENS on. numbers: of all of them."""
    device = executor.runner.kv_device
    assert device is not None
    token_bytes = executor.runner.kv_part_bytes(share)
    body = memory.part(STAMP_BYTES + tokens.start * token_bytes, len(tokens) * token_bytes)
    return device.scatter(numbers.part(tokens.start, tokens.stop), body, share, _after(executor, after_step))


def _numbers_of(executor: StepExecutor, target: Target) -> TokenNumbers:
    """Of the target's tokens in the pool."""
    return TokenNumbers(token_indexes(target.pages, 0, len(target.ids), executor.limits.page_size))


def _fetched_stamps(executor: StepExecutor, parts: Sequence[WrittenPart], copied: Copied, after_step: int) -> Fetched:
    """Heads and tails of regions in memory of the device, in this order, as they are behind copies from there."""
    device = executor.runner.kv_device
    assert device is not None
    regions = [part.memory for part in parts if isinstance(part.memory, DevicePiece)]
    ends = [region.part(start, STAMP_BYTES) for region in regions for start in (0, region.num_bytes - STAMP_BYTES)]
    return device.fetch(ends, copied, _after(executor, after_step))


def _after(executor: StepExecutor, step: int) -> DeviceEvent | None:
    """Of copies to pages that no step behind `step` uses."""
    # Loads from the host wait for steps, not for copies beside them.
    return executor.event_of(step) if executor.host is None else None


def _hold(executor: StepExecutor, copied: Copied) -> None:
    """Steps that are launched from now on wait for the copy."""
    device = executor.runner.kv_device
    assert device is not None
    device.hold(copied)


def _grant(executor: StepExecutor, target: Target, parts: Sequence[WrittenPart]) -> Failure:
    """Grants the pages. NONE: the parts may be copied to them."""
    if not _are_free(executor, target):
        return Failure.PAGES
    _grant_pages(executor, target)
    is_same = bool((executor.records.generations[target.pages] == target.generations).all())
    is_sound = is_same and _fits(executor, target, [part.share for part in parts])
    return Failure.NONE if is_sound else Failure.PAGES


def _grant_pages(executor: StepExecutor, target: Target) -> None:
    pages = target.pages
    executor.arriving.granted(pages)
    if executor.host is not None:
        executor.host.written_beside(pages)
    executor.overwritten(pages)
    executor.records.grant(
        pages,
        np.array([len(pages)]),
        previous_pages=np.array([target.previous_page], np.int32),
        namespaces=[target.namespace],
        weights_version=executor.weights_version,
    )


def _are_free(executor: StepExecutor, target: Target) -> bool:
    """True if the pages are some of the pool that no slot has."""
    is_known = -1 <= target.previous_page < executor.limits.num_pages
    return is_known and are_pages(executor, target.pages) and not executor.table.page_users[target.pages].any()


def _fits(executor: StepExecutor, target: Target, shares: Sequence[KvShare]) -> bool:
    """True if the tokens fill the pages, are of the vocabulary, and come with all heads."""
    ids, limits = target.ids, executor.limits
    if len(ids) != len(target.pages) * limits.page_size or int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size:
        return False
    return _are_all_heads(executor.runner.kv_share, shares)


def _write(runner: ModelRunner, pages: IntArray, num_tokens: int, memory: ByteArray, share: KvShare) -> None:
    """A region of the host to pages."""
    token_bytes = runner.kv_part_bytes(share)
    for chunk in chunks_of(num_tokens, token_bytes, tokens_at_a_time(token_bytes)):
        data = memory[chunk.offset : chunk.offset + chunk.num * token_bytes]
        runner.write_kv(token_indexes(pages, chunk.first, chunk.num, runner.page_size), data, share)


def _finish(executor: StepExecutor, target: Target, *, are_sound: bool) -> Failure:
    """The pages hold what the regions held, whatever that was. are_sound: the stamps were right behind the scatter."""
    if not are_sound:
        return Failure.STAMP
    _record(executor, target)
    return Failure.NONE


def _record(executor: StepExecutor, target: Target) -> None:
    at, size = np.arange(len(target.ids), dtype=np.int32), executor.limits.page_size
    executor.records.extend(target.pages[at // size], at % np.int32(size), target.ids)


def _are_stamped(parts: Sequence[WrittenPart], fetched: Sequence[bytes] = ()) -> bool:
    """True if regions have their stamps. fetched: of those in memory of the device, as _fetched_stamps() has them."""
    in_order = iter(fetched)
    return all(
        (next(in_order), next(in_order)) == (part.stamp, part.stamp)
        if isinstance(part.memory, DevicePiece)
        else has_stamps(part.memory, part.stamp)
        for part in parts
    )


def _are_all_heads(share: KvShare, parts: Sequence[KvShare]) -> bool:
    """True if they bring each head of a rank, once."""
    start = share.start
    for part in sorted(parts):
        if part.start != start or not share.has(part):
            return False
        start = part.stop
    return start == share.stop
