"""Checks that a plan can run, before anything of it does: a refused plan leaves no trace.

Checks follow the order in which a plan is applied; each sees the slots and pages as the parts before it would leave
them. What is asked of a plan follows from its bytes and the plans before it, never from values that only this rank has:
ranks at different lags refuse alike. Where decodes yield any number of tokens, the length of a slot is known within
bounds only: it is still known whether its prefill is over, and its pages are the plans', so nothing else is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit, DispatchMode, Grant, StepPlan, Task
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.admit_check import check_admit
from radixmesh.daemons.worker.plans.barrier_ops import check_barrier_ops, flushes
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.slots.slot_table import SlotTable
from radixmesh.daemons.worker.plans.tiers.host_tier import HostTier, check_moves
from radixmesh.daemons.worker.runner import ModelRunner

_PAGE_CONFLICT = ErrorReason.ERROR_REASON_PAGE_CONFLICT
_SLOT_CONFLICT = ErrorReason.ERROR_REASON_SLOT_CONFLICT
_INVALID = ErrorReason.ERROR_REASON_INVALID_ARGUMENT


def check_plan(
    plan: StepPlan,
    limits: Limits,
    table: SlotTable,
    records: PageRecordTable,
    runner: ModelRunner,
    host: HostTier | None = None,
) -> None:
    """Raises the MeshError of the refusal (SLOT_CONFLICT, PAGE_CONFLICT, UNSUPPORTED, ...). Changes nothing."""
    if plan.barrier_ops:
        check_barrier_ops(plan.barrier_ops, table, runner)
    check = _PlanCheck(plan, limits, table, records)
    check.run()
    if plan.saves or plan.loads:
        check.check_moves(host)


@dataclass(slots=True)
class _Lengths:
    """An admitted slot's lengths and pages, as the plan would leave them."""

    computed_len: int
    total_len: int
    num_pages: int


class _PlanCheck:
    def __init__(self, plan: StepPlan, limits: Limits, table: SlotTable, records: PageRecordTable) -> None:
        self._plan = plan
        self._limits = limits
        self._table = table
        self._records = records
        self._is_flushed = flushes(plan.barrier_ops)
        self._released: set[int] = set()
        self._admitted: dict[int, _Lengths] = {}
        self._grants: Mapping[int, Grant] = {}

    def run(self) -> None:
        self._check_releases()
        self._check_admits()
        self._check_grants()
        self._check_copies()
        self._check_forward()

    def check_moves(self, host: HostTier | None) -> None:
        """As run(), of what moves between tiers."""
        released = [self._table.pages(slot) for slot in self._released]
        taken = [grant.pages for grant in self._plan.grants] + [admit.cached_pages for admit in self._plan.admits]
        check_moves(
            self._plan,
            self._limits,
            self._table,
            self._records,
            host,
            is_flushed=self._is_flushed,
            released=np.concatenate(released) if released else empty_ints(),
            taken=np.concatenate(taken) if taken else empty_ints(),
        )

    def _check_releases(self) -> None:
        for release in self._plan.releases:
            slot = self._slot(release.slot, "releases")
            if self._table.is_occupied[slot] and self._table.generations[slot] == release.generation:
                self._released.add(slot)

    def _check_admits(self) -> None:
        for admit in self._plan.admits:
            slot = self._slot(admit.slot, "admits")
            if slot in self._admitted:
                raise slot_conflict(slot, "is admitted twice by this plan")
            if self._table.is_occupied[slot] and slot not in self._released:
                raise slot_conflict(slot, f"holds request {self._table.occupant(slot).request_id!r}: release it first")
            if admit.generation <= self._table.generations[slot]:
                current = int(self._table.generations[slot])
                raise slot_conflict(slot, f"had generation {current} already: admit with a higher one")
            check_admit(admit, self._limits)
            self._check_cached_pages(admit)
            total_len = len(admit.prompt_ids) + len(admit.output_ids)
            self._admitted[slot] = _Lengths(admit.cached_len, total_len, len(admit.cached_pages))

    def _check_cached_pages(self, admit: Admit) -> None:
        pages, records = admit.cached_pages, self._records
        if len(pages) == 0:
            return
        self._check_page_ids(pages, "admits.cached_pages")
        if self._is_flushed:
            raise page_conflict(int(pages[0]), "is named as cached by the plan that flushes the cache")
        if (repeated := _first_repeated(pages)) is not None:
            raise page_conflict(repeated, "is named twice by one request")
        is_stale = records.generations[pages] != admit.cached_page_generations
        if is_stale.any():
            which = int(np.argmax(is_stale))
            page, given = int(pages[which]), int(admit.cached_page_generations[which])
            raise page_conflict(page, f"has generation {records.generations[page]}, not {given}")
        is_partial = records.filled[pages] != self._limits.page_size
        if is_partial.any():
            page = int(pages[np.argmax(is_partial)])
            raise page_conflict(page, f"holds {records.filled[page]} tokens: only full pages can be shared")
        if (records.namespace_indexes[pages] != records.namespace_index(admit.cache_namespace)).any():
            raise page_conflict(int(pages[0]), f"or a later one is outside the namespace {admit.cache_namespace!r}")
        all_ids = np.concatenate((admit.prompt_ids, admit.output_ids))[: records.ids[pages].size]
        is_other = records.ids[pages] != all_ids.reshape(len(pages), -1)
        if is_other.any():
            page = int(pages[np.argmax(is_other.any(axis=1))])
            raise page_conflict(page, f"holds other tokens than request {admit.request_id!r} has there")

    def _check_grants(self) -> None:
        grants = self._plan.grants
        if grants:
            self._grants = {grant.slot: grant for grant in grants}
            self._check_granted_slots()
            self._check_granted_pages(np.concatenate([grant.pages for grant in grants]))
        copied = {copy.target_page: copy.num_tokens for copy in self._plan.page_copies}
        for admit in self._plan.admits:
            self._check_partial_page(admit, copied)

    def _check_granted_slots(self) -> None:
        if len(self._grants) != len(self._plan.grants):
            repeated = _first_repeated(np.array([grant.slot for grant in self._plan.grants]))
            assert repeated is not None
            raise slot_conflict(repeated, "has two grants in this plan: send one")
        most = self._limits.max_pages_per_slot
        for slot, grant in self._grants.items():
            self._held_slot(slot, "grants")
            if slot in self._admitted:
                num_pages = self._admitted[slot].num_pages + len(grant.pages)
                self._admitted[slot].num_pages = num_pages
            else:
                num_pages = int(self._table.num_pages[slot]) + len(grant.pages)
            if num_pages > most:
                raise _invalid("grants.counts", f"slot {slot} would hold {num_pages} pages: {most} are enough", most)

    def _check_granted_pages(self, pages: IntArray) -> None:
        self._check_page_ids(pages, "grants.pages")
        if (repeated := _first_repeated(pages)) is not None:
            raise page_conflict(repeated, "is granted twice by this plan")
        used = pages[self._table.page_users[pages] > 0]
        if len(used):
            let_go = [self._table.pages(slot) for slot in self._released]
            is_held = self._table.page_users[used] > _times_in(let_go, used)
            if is_held.any():
                raise page_conflict(int(used[np.argmax(is_held)]), "is granted but another slot still holds it")
        cached = [admit.cached_pages for admit in self._plan.admits if len(admit.cached_pages)]
        is_cached = _times_in(cached, pages) > 0
        if is_cached.any():
            raise page_conflict(int(pages[is_cached].min()), "is granted and named as cached by one plan")

    def _check_partial_page(self, admit: Admit, copied: Mapping[int, int]) -> None:
        num_tokens = admit.cached_len % self._limits.page_size
        if num_tokens == 0:
            return
        grant = self._grants.get(admit.slot)
        if grant is None or copied.get(int(grant.pages[0])) != num_tokens:
            message = (
                f"slot {admit.slot} has {admit.cached_len} cached tokens: the last {num_tokens} need a page copy of as"
                " many into its first granted page"
            )
            raise _invalid("page_copies", message)

    def _check_copies(self) -> None:
        copies = self._plan.page_copies
        if not copies:
            return
        granted = {page for grant in self._grants.values() for page in grant.pages.tolist()}
        targets: set[int] = set()
        for copy in copies:
            source, target = copy.source_page, copy.target_page
            self._check_page_ids(np.array([source, target], np.int32), "page_copies")
            if target not in granted or target in targets:
                raise page_conflict(target, "is the target of a copy: grant it in the same plan, and copy to it once")
            if source in granted:
                raise page_conflict(source, "is the source of a copy and granted anew by the same plan")
            if self._is_flushed or copy.num_tokens > self._records.filled[source]:
                held = 0 if self._is_flushed else int(self._records.filled[source])
                raise page_conflict(source, f"holds {held} tokens: {copy.num_tokens} of them cannot be copied")
            targets.add(target)

    def _check_forward(self) -> None:
        plan = self._plan
        decodes = self._table.decode_set if plan.decode_set is None else plan.decode_set
        if plan.decode_set is not None and len(decodes):
            self._slot(int(decodes.max()), "decode_set")
            if (repeated := _first_repeated(decodes)) is not None:
                raise slot_conflict(repeated, "occurs twice in the decode set")
        if not plan.has_forward:
            if plan.chunks:
                raise _invalid("chunks", "a plan without a forward has chunks: set the header's shape")
            return
        num_tokens = len(decodes) + sum(chunk.length for chunk in plan.chunks)
        most = self._limits.max_tokens_per_step
        if num_tokens > most:
            raise _invalid("chunks.lengths", f"the step has {num_tokens} tokens: at most {most} fit", most)
        self._check_shape(num_tokens)
        self._check_decodes(decodes)
        self._check_chunks(set(decodes.tolist()) if plan.chunks else set())

    def _check_shape(self, num_tokens: int) -> None:
        """Ranks reserve memory by the shape of the header; one that brings more would overrun it."""
        shape, most = self._plan.max_tokens_per_rank, self._limits.max_tokens_per_step
        if shape > most:
            raise _invalid("header.shape.max_tokens_per_rank", f"is {shape}: at most {most} tokens fit a step", most)
        if self._plan.dispatch is DispatchMode.LOW_LATENCY and not shape:
            raise _invalid("header.shape.max_tokens_per_rank", "is missing: low-latency dispatch needs it")
        if shape and num_tokens > shape:
            what = f"is {shape}, this rank has {num_tokens} tokens: send the most of all ranks"
            raise _invalid("header.shape.max_tokens_per_rank", what, num_tokens)

    def _check_decodes(self, decodes: IntArray) -> None:
        table = self._table
        is_ready = table.is_occupied[decodes] & table.is_generating[decodes]
        is_ready &= table.computed_len[decodes] == table.total_len[decodes] - 1
        for slot in self._released:
            is_ready[decodes == slot] = False
        for admit in self._plan.admits:
            lengths = self._admitted[admit.slot]
            is_whole = lengths.computed_len == lengths.total_len - 1
            is_ready[decodes == admit.slot] = is_whole and admit.task is Task.GENERATE
        if not is_ready.all():
            slot = int(decodes[np.argmin(is_ready)])
            is_free = slot not in self._admitted and (slot in self._released or not table.is_occupied[slot])
            what = "is free: send a new decode set with its release" if is_free else "has not finished a prefill"
            raise slot_conflict(slot, f"is in the decode set and {what}")

    def _check_chunks(self, decodes: set[int]) -> None:
        seen: set[int] = set()
        for chunk in self._plan.chunks:
            slot = self._held_slot(chunk.slot, "chunks")
            if slot in seen or slot in decodes:
                where = "another chunk" if slot in seen else "the decode set"
                raise slot_conflict(slot, f"has a chunk and is in {where} of the same step")
            seen.add(slot)
            if slot not in self._admitted and self._table.is_bounded[slot]:
                raise slot_conflict(
                    slot, "decoded with several tokens a row: no chunk can follow, its length is a bound"
                )
            lengths = self._lengths(slot)
            end = lengths.computed_len + chunk.length
            if end > lengths.total_len:
                left = lengths.total_len - lengths.computed_len
                message = f"slot {slot} has {left} tokens to compute, its chunk {chunk.length}"
                raise _invalid("chunks.lengths", message, left)
            if lengths.num_pages * self._limits.page_size < end:
                raise MeshError(
                    _PAGE_CONFLICT,
                    f"slot {slot} holds {lengths.num_pages} pages, its chunk ends at token {end}: grant pages first",
                    {"slot": str(slot)},
                )

    def _lengths(self, slot: int) -> _Lengths:
        admitted = self._admitted.get(slot)
        if admitted is not None:
            return admitted
        table, grant = self._table, self._grants.get(slot)
        num_pages = int(table.num_pages[slot]) + (len(grant.pages) if grant else 0)
        return _Lengths(int(table.computed_len[slot]), int(table.total_len[slot]), num_pages)

    def _slot(self, slot: int, field: str) -> int:
        if not 0 <= slot < self._limits.num_slots:
            raise slot_conflict(slot, f"of {field} does not exist: slots end at {self._limits.num_slots - 1}")
        return slot

    def _held_slot(self, slot: int, field: str) -> int:
        self._slot(slot, field)
        if slot not in self._admitted and (slot in self._released or not self._table.is_occupied[slot]):
            raise slot_conflict(slot, f"of {field} is free: admit a request first")
        return slot

    def _check_page_ids(self, pages: IntArray, field: str) -> None:
        highest = int(pages.max())
        if highest >= self._limits.num_pages or pages.min() < 0:
            raise page_conflict(highest, f"of {field} does not exist: pages end at {self._limits.num_pages - 1}")


def slot_conflict(slot: int, what: str) -> MeshError:
    """Slot `slot` forbids the plan."""
    return MeshError(_SLOT_CONFLICT, f"slot {slot} {what}", {"slot": str(slot)})


def page_conflict(page: int, what: str) -> MeshError:
    """Page `page` forbids the plan."""
    return MeshError(_PAGE_CONFLICT, f"page {page} {what}", {"page": str(page)})


def _invalid(field: str, message: str, most: int | None = None) -> MeshError:
    metadata = {"field": field} if most is None else {"field": field, "max": str(most)}
    return MeshError(_INVALID, message, metadata)


def _times_in(parts: Sequence[IntArray], pages: IntArray) -> npt.NDArray[np.int_]:
    """Number of times that each of `pages` occurs in the parts, which may be tens of thousands of pages together."""
    ordered = np.sort(np.concatenate(parts)) if parts else empty_ints()
    return np.searchsorted(ordered, pages, "right") - np.searchsorted(ordered, pages, "left")


def _first_repeated(values: IntArray) -> int | None:
    """The least value that occurs again; None: all differ. np.unique() takes twenty times as long for the thousands of
    pages of a long prompt."""
    ordered = np.sort(values)
    repeated = ordered[1:] == ordered[:-1]
    return int(ordered[1:][repeated][0]) if repeated.any() else None
