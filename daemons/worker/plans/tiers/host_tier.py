"""The host tier of a worker's KV: page records of host memory, the copies that plans ask for, loads under way."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, as_ints, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import PageMove, StepPlan
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.worker.host_memory.host_pool import HostPool
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.slots.slot_table import SlotTable
from radixmesh.daemons.worker.plans.tiers.host_records import HostRecords
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent

if TYPE_CHECKING:
    from radixmesh.daemons.worker.plans.tiers.store_tier import StoreTier

_log = get_logger(__name__)

_PAGE_CONFLICT = ErrorReason.ERROR_REASON_PAGE_CONFLICT
_POLL_S = 0.001
_BESIDE_STEPS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A load under way. ids: int32 [pages, page_size]; generations: of the device pages, as the load granted them."""

    op_id: int
    event: DeviceEvent
    device_pages: IntArray
    host_pages: IntArray
    generations: IntArray
    ids: IntArray


class _Save(NamedTuple):
    """Host pages with the generations that they were granted for it; event: behind the copy."""

    event: DeviceEvent
    pages: IntArray
    generations: IntArray


class LoadOrNext(DeviceEvent):
    """The end of a load, or the next plan, whichever comes first: answers keep their order, and one that waited for
    a load alone would hold up those of requests that came meanwhile."""

    def __init__(self, load: DeviceEvent) -> None:
        self._load, self._next = load, threading.Event()

    @property
    def is_passed(self) -> bool:
        """The next plan is there."""
        return self._next.is_set()

    @property
    def is_done(self) -> bool:
        return self._next.is_set() or self._load.is_done

    def pass_on(self) -> None:
        """The next plan is there."""
        self._next.set()

    def wait(self) -> None:
        while not self.is_done:
            self._load.wait_beside(self._next, _POLL_S)
        if not self.is_passed:
            self._load.wait()  # Raises what the device says if it has failed.


class HostTier:
    """Of one executor. `records` are those of host pages; a save fills them at once, since whatever is planned later
    comes behind it. The device's record of a loaded page stays empty until its copy is over."""

    def __init__(self, pool: HostPool, limits: Limits) -> None:
        self.pool = pool
        self.records = HostRecords(replace(limits, num_pages=pool.num_pages), pool.segment)
        self._saving: deque[_Save] = deque()
        """Saves that are not committed yet, in a pool whose memory outlives the worker."""
        self._page_size = limits.page_size
        # Steps that accept drafts may move KV after it was counted.
        self._settles_in_order = limits.max_tokens_per_row == 1
        self.metrics: Metrics | None = None
        """Told of the bytes that are copied."""
        self.store: StoreTier | None = None
        """Keeps pages that are saved; None: nothing lies below the host."""
        self._loading: list[_Load] = []
        self._loaded: list[int] = []
        self._last_op = 0
        # Of each device page, the last step by which slots that held it have left, 0 = none of this epoch.
        self._last_steps = np.zeros(limits.num_pages, np.int64)
        # Plans that were queued may still run while the worker ends: a segment is another worker's behind close().
        self._ending = threading.RLock()
        self._is_closed = False

    @property
    def next_event(self) -> DeviceEvent:
        """Behind the load that is over first."""
        return self._loading[0].event if self._loading else DONE

    @property
    def last_op(self) -> int:
        """Id of the last load of the epoch; 0 = none."""
        return self._last_op

    def loading_pages(self) -> IntArray:
        """Device pages that loads write to, int32."""
        return _joined([load.device_pages for load in self._loading])

    def loading_host_pages(self) -> IntArray:
        """Host pages that loads read from, int32."""
        return _joined([load.host_pages for load in self._loading])

    def save(self, moves: Sequence[PageMove], device: PageRecordTable, weights_version: int) -> None:
        """Copies pages to the host, records included. Raises RuntimeError behind close()."""
        with self._ending:
            self._refuse_closed()
            self._save(moves, device, weights_version)

    def _save(self, moves: Sequence[PageMove], device: PageRecordTable, weights_version: int) -> None:
        _chain(moves, device, self.records, weights_version, to_host=True)
        pages = _joined([move.device_pages for move in moves])
        # Full pages hold what steps wrote that are settled: those under way write behind it.
        is_settled = self._settles_in_order and not (self._last_steps[pages] == _BESIDE_STEPS).any()
        self.pool.save(pages, _joined([move.host_pages for move in moves]), DONE if is_settled else None)
        if self.pool.segment is not None:
            host_pages = _joined([move.host_pages for move in moves])
            self._saving.append(_Save(self.pool.saved(), host_pages, self.records.generations[host_pages]))
            self._commit_saves()
        self._count("saved", moves)
        if self.store is not None:
            self.store.saved(moves)

    def used(self, pages: IntArray, step_id: int) -> None:
        """A slot leaves device pages that steps up to this one may use."""
        self._last_steps[pages] = np.maximum(self._last_steps[pages], step_id)

    def written_beside(self, pages: IntArray) -> None:
        """Something other than a step writes to device pages, or reads them, behind all that was launched. Loads to
        them wait for everything from now on."""
        self.pool.overwritten(pages)
        self._last_steps[pages] = _BESIDE_STEPS

    def load(
        self,
        moves: Sequence[PageMove],
        device: PageRecordTable,
        weights_version: int,
        event_of: Callable[[int], DeviceEvent],
    ) -> None:
        """Starts copies from the host; the device pages are granted. event_of: a step that was launched, by its id."""
        all_ids = [self.records.ids[move.host_pages] for move in moves]
        _chain(moves, self.records, device, weights_version, to_host=False)
        for move, ids in zip(moves, all_ids, strict=True):
            # Waiting for steps that do not use the pages would take as long as the steps.
            last_step = int(self._last_steps[move.device_pages].max())
            behind = None if last_step == _BESIDE_STEPS else event_of(last_step)
            self._loading.append(
                _Load(
                    op_id=move.op_id,
                    event=self.pool.load(move.host_pages, move.device_pages, behind),
                    device_pages=move.device_pages.copy(),
                    host_pages=move.host_pages.copy(),
                    generations=device.generations[move.device_pages],
                    ids=ids,
                )
            )
        self._last_op = moves[-1].op_id
        self._count("loaded", moves)

    def _count(self, move: str, moves: Sequence[PageMove]) -> None:
        if self.metrics is not None:
            num_pages = sum(len(each.host_pages) for each in moves)
            self.metrics.host_kv_bytes.labels(move).inc(num_pages * self.pool.page_bytes)

    def settle(self, device: PageRecordTable) -> None:
        """Fills the device's records of loads that are over, in the order of their starts."""
        num = 0
        while num < len(self._loading) and self._loading[num].event.is_done:
            load = self._loading[num]
            load.event.wait()  # Raises what the device says if it has failed.
            # As the steps' writes: a page that moved on keeps what it got since.
            pages, size = load.device_pages, self._page_size
            offsets = np.tile(np.arange(size, dtype=np.int32), len(pages))
            device.extend_if(np.repeat(pages, size), np.repeat(load.generations, size), offsets, load.ids.reshape(-1))
            self._loaded.append(load.op_id)
            num += 1
        del self._loading[:num]

    def _commit_saves(self) -> None:
        """Commits what has been copied by now."""
        with self._ending:
            while not self._is_closed and self._saving and self._saving[0].event.is_done:
                save = self._saving.popleft()
                save.event.wait()  # Raises what the device says if it has failed.
                self.records.commit(save.pages, save.generations)

    def take_loaded(self, device: PageRecordTable) -> tuple[int, ...]:
        """Op ids of loads that have completed and were not told of yet."""
        if self._loading:
            self.settle(device)
        if self._saving:
            self._commit_saves()
        loaded, self._loaded = tuple(self._loaded), []
        return loaded

    def finish(self, device: PageRecordTable) -> None:
        """Waits for all copies."""
        for load in self._loading:
            load.event.wait()
        self.settle(device)
        self.pool.wait()
        self._commit_saves()

    def begin_epoch(self, device: PageRecordTable) -> None:
        """Copies of the epoch before are over; nobody asks for their ids any more."""
        self.finish(device)
        self._loaded.clear()
        self._last_op = 0
        self._last_steps[self._last_steps != _BESIDE_STEPS] = 0

    def flush(self) -> None:
        """Empties all host pages; no copy runs. Raises RuntimeError behind close()."""
        with self._ending:
            self._refuse_closed()
            self.records.flush()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the worker ends, and its host memory may be another's")

    def close(self) -> None:
        """Nothing is saved any more. Any thread."""
        if self.store is not None:
            self.store.close()
        with self._ending:
            segment = self.pool.segment
            if segment is not None:
                try:
                    self.pool.wait()
                    self._commit_saves()
                except RuntimeError as error:
                    # Of a device that has failed: what it was copying stays uncommitted.
                    _log.warning("host_kv_not_committed", error=repr(error))
                segment.close()
            self._is_closed = True

    def reset(self) -> None:
        """As in a new process: every rank of a new group begins with what all have. Raises RuntimeError behind
        close()."""
        for load in self._loading:
            load.event.wait()
        self.pool.wait()
        self._commit_saves()
        self._loading.clear()
        self._loaded.clear()
        self._last_op = 0
        self._last_steps[self._last_steps != _BESIDE_STEPS] = 0
        with self._ending:
            self._refuse_closed()
            self.records.reset()
        if self.store is not None:
            self.store.reset()


def check_moves(
    plan: StepPlan,
    limits: Limits,
    table: SlotTable,
    records: PageRecordTable,
    host: HostTier | None,
    *,
    is_flushed: bool,
    released: IntArray,
    taken: IntArray,
) -> None:
    """Raises UNSUPPORTED, PAGE_CONFLICT or INVALID_ARGUMENT for saves and loads that cannot run.

    released: pages of slots that the plan frees, one by one; taken: pages that it grants or names as cached.
    """
    if host is None:
        message = "the worker has no host tier: set its --host-kv-bytes, or plan no saves and loads"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "host_tier"})
    num_host = host.pool.num_pages
    for name, moves in (("saves", plan.saves), ("loads", plan.loads)):
        for move in moves:
            _check_ids(move.device_pages, limits.num_pages, f"{name}.device_pages")
            _check_ids(move.host_pages, num_host, f"{name}.host_pages")
            most = num_host if name == "saves" else limits.num_pages
            _check_ids(as_ints([max(0, move.previous_page)]), most, f"{name}.previous_pages")
    size = limits.page_size
    sources = _joined([move.device_pages for move in plan.saves])
    targets = _joined([move.host_pages for move in plan.saves])
    if len(sources):
        _check_full(sources, records, size, "saves.device_pages", is_flushed=is_flushed)
        _check_once(targets, "is saved to twice by this plan")
        _check_apart(targets, host.loading_host_pages(), "is saved to while a load reads it: wait for its completion")
        for move in plan.saves:
            _check_namespace(move.device_pages, records)
    if not plan.loads:
        return
    read = _joined([move.host_pages for move in plan.loads])
    written = _joined([move.device_pages for move in plan.loads])
    saved_here = np.isin(read, targets)
    _check_full(read[~saved_here], host.records, size, "loads.host_pages", is_flushed=is_flushed)
    _check_once(written, "is loaded to twice by this plan")
    _check_apart(written, taken, "is loaded to, and granted or named as cached by the same plan")
    _check_apart(written, host.loading_pages(), "is loaded to while another load writes it")
    used = written[table.page_users[written] > np.bincount(released, minlength=limits.num_pages)[written]]
    if len(used):
        raise _conflict(int(used[0]), "is loaded to but a slot still holds it")
    ids = [host.last_op, *(move.op_id for move in plan.loads)]
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        message = f"op ids {ids[1:]} follow {ids[0]}: they rise within an epoch"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "loads.op_ids"})


def _chain(
    moves: Sequence[PageMove], source: PageRecordTable, target: PageRecordTable, weights_version: int, *, to_host: bool
) -> None:
    """Grants the pages that are moved to. Those of host memory hold their tokens from now on."""
    names = source.namespaces
    read = [move.device_pages if to_host else move.host_pages for move in moves]
    written = [move.host_pages if to_host else move.device_pages for move in moves]
    namespaces = [names[source.namespace_indexes[pages[0]]] for pages in read]
    ids = source.ids[np.concatenate(read)]
    pages = np.concatenate(written)
    # One by one: a save may follow on another of the same plan, whose pages must have their new generations by then.
    for move, granted, namespace in zip(moves, written, namespaces, strict=True):
        target.grant(
            granted,
            np.array([len(granted)]),
            previous_pages=as_ints([move.previous_page]),
            namespaces=[namespace],
            weights_version=weights_version,
        )
    if to_host:
        target.ids[pages] = ids
        target.filled[pages] = ids.shape[1]


def _check_ids(pages: IntArray, num: int, field: str) -> None:
    if len(pages) and (int(pages.max()) >= num or pages.min() < 0):
        raise _conflict(int(pages.max()), f"of {field} does not exist: pages end at {num - 1}")


def _check_full(pages: IntArray, records: PageRecordTable, size: int, field: str, *, is_flushed: bool) -> None:
    if len(pages) and (is_flushed or (records.filled[pages] != size).any()):
        page = int(pages[0] if is_flushed else pages[np.argmax(records.filled[pages] != size)])
        raise _conflict(page, f"of {field} is not full: full pages alone move between tiers")


def _check_namespace(pages: IntArray, records: PageRecordTable) -> None:
    names = records.namespace_indexes[pages]
    if (names != names[0]).any():
        page = int(pages[np.argmax(names != names[0])])
        raise _conflict(page, "is in another namespace than the page before it: an op is a run of one prefix")


def _check_once(pages: IntArray, what: str) -> None:
    ordered = np.sort(pages)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise _conflict(int(repeated[0]), what)


def _check_apart(pages: IntArray, others: IntArray, what: str) -> None:
    both = np.intersect1d(pages, others)
    if len(both):
        raise _conflict(int(both[0]), what)


def _conflict(page: int, what: str) -> MeshError:
    return MeshError(_PAGE_CONFLICT, f"page {page} {what}", {"page": str(page)})


def _joined(parts: Sequence[IntArray]) -> IntArray:
    pages: IntArray = np.concatenate(parts) if parts else empty_ints()
    return pages
