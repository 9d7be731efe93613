"""The scheduler's loop as a pure object: submits and results in, plans and outputs out. No I/O; time is an argument.

Each request catches up its computed length with its tokens: cached_len <= computed_len <= total_len. A fresh prompt, a
chunk of it, a resumed output and a decode are one thing with different distances. Plans are made from lengths alone, so
several can be in flight: every decoding slot is assumed to get one token per plan, and tokens that turn out to lie
beyond an end (EOS, stop id, abort, stop string) are dropped when their results come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as PySequence
from dataclasses import replace
from typing import NamedTuple

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.scheduler.cache.feed import CacheFeed
from radixmesh.daemons.scheduler.cache.prefix_cache import check_cache_choice
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.group.suspects import PoisonIsolation
from radixmesh.daemons.scheduler.planning.admission.decode_reserve import DecodeReserve
from radixmesh.daemons.scheduler.planning.admission.grammar_gate import GrammarGate
from radixmesh.daemons.scheduler.planning.admission.prefill import Prefill
from radixmesh.daemons.scheduler.planning.counters import PlannerCounters, check_pages
from radixmesh.daemons.scheduler.planning.decode_grants import grant_decodes
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.planning.experts.expert_balancer import ExpertBalancer, barrier_plan
from radixmesh.daemons.scheduler.planning.flush import CacheFlush
from radixmesh.daemons.scheduler.planning.plan_writer import enter_in_flight, most_tokens_of_a_rank, plan_of
from radixmesh.daemons.scheduler.planning.preemption import Preemption
from radixmesh.daemons.scheduler.planning.retraction import Retraction
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.planning.timing.step_estimate import StepEstimate
from radixmesh.daemons.scheduler.planning.timing.token_time import TokenTime
from radixmesh.daemons.scheduler.queue.deadlines import Deadlines, deadline_error
from radixmesh.daemons.scheduler.queue.intake import Intake, aborted_error
from radixmesh.daemons.scheduler.queue.limits import QueueLimits
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.queue.submissions import AbortOutcome, Submissions
from radixmesh.daemons.scheduler.queue.validation import check_submission
from radixmesh.daemons.scheduler.results.expert_load import REPORT_STEPS
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep
from radixmesh.daemons.scheduler.results.joined_results import joined_in
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs
from radixmesh.daemons.scheduler.results.result_reader import Prefilled, ResultReader, share_prompts
from radixmesh.daemons.scheduler.results.stop_conditions import SequenceEnd, StopWatch
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence, Submission
from radixmesh.daemons.scheduler.sequence_observer import SequenceObserver
from radixmesh.daemons.scheduler.tiers.kv_fetches import KvFetches
from radixmesh.daemons.scheduler.tiers.kv_loads import KvLoads
from radixmesh.daemons.scheduler.tiers.stored_prefixes import StoredPrefixes
from radixmesh.daemons.scheduler.transfers.arrival import ArrivalRoom
from radixmesh.daemons.scheduler.transfers.arrivals import KvArrivals
from radixmesh.daemons.scheduler.transfers.handovers import KvHandovers
from radixmesh.daemons.scheduler.transfers.kv_target import KvTarget


class _Unsettled(NamedTuple):
    """A result whose tokens were taken."""

    step: PlannedStep
    result: StepResult
    prompts: PySequence[Prefilled]


class Planner:
    """Owns queue, slots, pages and cache of one worker group.

    One thread calls it. first_revision: see CacheFeed. After any call take_outputs() has what there is to say to those
    who submitted.
    """

    def __init__(
        self, settings: PlannerSettings, *, first_revision: int = 0, observer: SequenceObserver | None = None
    ) -> None:
        self._settings = settings
        check_cache_choice(settings.cache, settings.eviction)
        self.queue = WaitingQueue(settings.queue_settings())
        self._limits = QueueLimits(settings.max_queue, settings.max_queue_tokens)
        self.submissions = Submissions()
        self._decode_reserve = DecodeReserve(settings.decode_reserve_tokens, settings.grant_ahead_tokens)
        self.prefill: Prefill | None = None
        self._state: EpochState | None = None
        self._group: GroupInfo | None = None
        self._stop_watch = StopWatch(0)
        self._observer = observer or SequenceObserver()
        self._outputs = Outputs()
        self.deadlines = Deadlines()
        self._poison = PoisonIsolation()
        self.cache_feed = CacheFeed(first_revision=first_revision)
        self.flush = CacheFlush()
        self.experts = ExpertBalancer(settings.balance)
        self.estimate = StepEstimate()
        self.token_time = TokenTime()
        self.counters = PlannerCounters()
        self._unsettled: deque[_Unsettled] = deque()
        self.grammars = GrammarGate(self.queue)
        self.arrivals = KvArrivals(
            self.queue,
            ArrivalRoom(self._decode_reserve, settings.prefill_limits),
            patience_s=settings.transfer_timeout_s,
            queue_s=settings.transfer_queue_s,
        )
        self.handovers = KvHandovers(self._finish, chunk_tokens=settings.transfer_chunk_tokens)
        tiers = settings.tiers
        self.loads = KvLoads(
            self.queue,
            timeout_s=tiers.load_timeout_s,
            estimate=self.estimate,
            window_tokens=tiers.load_window_tokens,
        )
        self.fetches = KvFetches(
            self.queue, min_tokens=tiers.fetch_min_tokens, timeout_s=tiers.load_timeout_s, estimate=self.estimate
        )
        self._stored: tuple[StoredPrefixes, ...] = ()
        self._stored_by: GroupInfo | None = None
        self._intake = Intake(
            self.submissions, self.queue, self._limits, self.deadlines, self.counters, self._finish, self._observer
        )
        self._retraction = Retraction(self.queue, self._decode_reserve, self.counters, self._finish, self._let_go)
        self._reader = ResultReader(self._finish, self._retraction.leave, self._observer, self.grammars.missed)
        self._preemption = Preemption.of(settings, self.queue, self._retraction, self.counters)

    @property
    def state(self) -> EpochState | None:
        """Slots and pages of the epoch; None between epochs."""
        return self._state

    @property
    def group(self) -> GroupInfo | None:
        """The group as last seen; None before the first epoch."""
        return self._group

    def _let_go(self, state: EpochState) -> bool:
        """Unlocks cached pages that are kept for requests without a slot; False: there are none."""
        return self.loads.let_go(state) or self.arrivals.let_go(state)

    @property
    def num_running(self) -> int:
        return self._state.table.num_running if self._state is not None else 0

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self.submissions) - self.num_running

    @property
    def waiting_tokens(self) -> int:
        return self.queue.waiting_tokens

    @property
    def decode_reserve_tokens(self) -> int:
        """Tokens for which admission keeps pages free, per running request."""
        return int(self._decode_reserve.num_tokens)

    def owners(self) -> set[int]:
        """Streams that live requests belong to."""
        return {sequence.owner for sequence in self.submissions.live()}

    @property
    def num_live(self) -> int:
        return len(self.submissions)

    @property
    def num_going_on(self) -> int:
        """Live requests behind the first token of those in slots: what is handed over ends with it."""
        return max(0, len(self.submissions) - self.handovers.num_running)

    @property
    def num_in_flight(self) -> int:
        return len(self._state.in_flight) if self._state is not None else 0

    def take_outputs(self) -> Outputs:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs, Outputs()
        return outputs

    # -- what routers ask for

    def submit(self, submission: Submission) -> None:
        """Queues a request, or rejects it: the outputs say which. Equal submits are taken once."""
        self._intake.submit(submission, self._group, self._state, self._stop_watch, self._outputs)
        if submission.transfer_id and (sequence := self.submissions.get(submission.key)) is not None:
            self.arrivals.expect(sequence)

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        below_attempt: int | None = None,
        tenant: str | None = None,
        owner: int | None = None,
    ) -> AbortOutcome:
        """Ends live requests. tenant None: of any tenant. owner: those of that stream, None = of any router."""
        found = self.submissions.find(request_id, index, below_attempt, tenant, owner)
        for sequence in found:
            # Whoever submitted it need not be who aborts it: the finish says why.
            self._finish(sequence, SequenceEnd(FinishReason.ABORT), aborted_error(request_id, below_attempt))
            if below_attempt is None:
                self.submissions.aborted(sequence)
        if found:
            return AbortOutcome.FOUND
        is_known = self.submissions.has_ended(request_id, index, tenant)
        return AbortOutcome.FINISHED if is_known else AbortOutcome.UNKNOWN

    def abort_owner(self, owner: int) -> int:
        """Ends the requests of a stream that is gone; returns how many there were."""
        sequences = self.submissions.of_owner(owner)
        for sequence in sequences:
            self._finish(sequence, SequenceEnd(FinishReason.ABORT))
        return len(sequences)

    def take_target(self, owner: int, target: KvTarget) -> None:
        """Says where the KV goes of a prompt that the stream has submitted ahead of that. Unknown ones are fine."""
        for sequence in self.submissions.of_owner(owner):
            awaited = sequence.submission.send_kv_to
            if awaited is not None and awaited.transfer_id == target.transfer_id and not awaited.is_known:
                self.handovers.targeted(self._state, sequence, target)

    def finish_by_stop(self, owner: int, handle: int, num_output: int) -> None:
        """A stop string ended an output at that length; unknown handles have ended already."""
        sequence = self.submissions.by_handle(owner, handle)
        if sequence is not None:
            if self._state is not None:
                self._state.settle(sequence)
            self._finish(sequence, SequenceEnd(FinishReason.STOP), num_output=min(num_output, len(sequence.output)))

    # -- the worker group

    def begin_epoch(
        self, epoch: int, group: GroupInfo, snapshot: CacheSnapshot | PySequence[CacheSnapshot] | None
    ) -> int:
        """Starts over on a claimed group with the KV that its page records describe; returns the tokens adopted.

        All requests wait again, their output kept; those that the group can no longer run fail. snapshot: of the only
        data-parallel rank, or of each; None: no KV is there.
        """
        self.end_epoch()
        from_outside = self._group is not None and group.lost_from_outside(self._group)
        for sequence, reason in self._poison.regained(from_outside=from_outside):
            self._finish(sequence, SequenceEnd(FinishReason.ERROR), reason)
        if self._group is None or self._group.vocab_size != group.vocab_size:
            self._stop_watch = StopWatch(group.vocab_size)
            for sequence in self.submissions.live():
                self._stop_watch.watch(t for t in sequence.end_ids if t < group.vocab_size)
        self._group = group
        settings = self._settings
        snapshots = (snapshot,) if isinstance(snapshot, CacheSnapshot) else snapshot
        self._state = EpochState(
            epoch,
            group,
            snapshots,
            settings.cache,
            settings.eviction,
            settings.dispatch,
            settings.tiers_of(group),
            self._stored_of(group),
        )
        self._state.table.ranks_across_tenants = settings.priority_across_tenants
        self.experts.begin_epoch(epoch, group.experts, group.barrier_ops)
        self.prefill = Prefill(
            settings.prefill_limits(group),
            self.queue,
            self._decode_reserve,
            self.counters,
            self._observer,
            self.grammars,
            self.arrivals,
            self.handovers,
            self.loads,
            self.fetches,
        )
        for sequence in self.submissions.live():
            try:
                check_submission(sequence.submission, group)
            except MeshError as error:
                self._finish(sequence, SequenceEnd(FinishReason.ERROR), error)
        caches = [pages.cache for pages in self._state.ranks]
        caches += [host.cache for host in self._state.hosts] + [stored.cache for stored in self._state.stored]
        self.cache_feed.follow(caches, group.dp_size)
        self.counters.adopted_tokens += self._state.num_adopted_tokens
        return self._state.num_adopted_tokens

    def end_epoch(self, refused_step: int = 0, error: MeshError | None = None) -> None:
        """The group is lost, or refused a plan: results still outstanding are void, every request waits again.

        A request that keeps the group from serving fails, now or when the group is back: see PoisonIsolation.
        """
        state, self._state = self._state, None
        self._unsettled.clear()
        if state is None:
            return
        self.flush.interrupted()
        for host in state.hosts:
            self.counters.tiers.add(host.counters)
            host.end_epoch()
        self.cache_feed.follow(())
        self.counters.evicted_pages += state.num_evicted
        self.queue.unpark_all()
        self.grammars.begin_epoch()
        self.arrivals.begin_epoch()
        self.handovers.begin_epoch()
        self.loads.begin_epoch()
        self.fetches.begin_epoch()
        poisonous = self._poison.epoch_ended(state, refused_step, error)
        for sequence in state.end():
            self.queue.push(sequence)
        for sequence, reason in poisonous:
            self._finish(sequence, SequenceEnd(FinishReason.ERROR), reason)

    def end_lease(self, pages: IntArray, rank: int = 0) -> int:
        """A worker says that transfers no longer use these pages, int32; returns how many can be granted again."""
        return self._state.ranks[rank].end_lease(pages) if self._state is not None else 0

    def grammar_failed(self, blob_hash: str, error: MeshError) -> None:
        """The workers refuse a grammar for good: those that follow it fail."""
        for sequence in self.grammars.take_waiting(blob_hash):
            if sequence.lifecycle is Lifecycle.WAITING:
                self._finish(sequence, SequenceEnd(FinishReason.ERROR), error)

    def plan(self, now: float, *, is_heartbeat: bool = False) -> StepPlan | None:
        """The next step, which the caller must send; None = there is nothing to do before the next result or submit.

        is_heartbeat: an empty plan rather than None; it tells the worker that its holder lives, and us that it does.
        """
        self._expire(now)
        state, prefill = self._state, self.prefill
        if state is None:
            return None
        assert prefill is not None, "it comes with the state"
        assert not self._unsettled, "results are settled before the next plan"
        self.arrivals.pass_time(state, now)
        self.handovers.pass_time(state, now)
        if state.hosts:
            self.loads.pass_time(state, now)
            self.fetches.pass_time(now)
        self.queue.begin_plan(state.probe)
        prefill.begin_plan(state)
        if self.flush.is_wanted:
            self.arrivals.give_up(state)
            self.loads.let_go(state)
            is_quiet = not (len(self.arrivals) or len(self.fetches) or self.loads.num_under_way)
            if is_quiet and self.flush.may_run(state):
                return self._sent(state, self.flush.make_plan(state), PlanDraft(state.table.num_ranks), now)
        # A transfer that was written a moment ago counts on the next plan: that releases the slots whose pages it got,
        # and saves what was evicted for it.
        is_awaited = len(self.arrivals) and (state.releases or any(host.has_saves for host in state.hosts))
        may_move_experts = self.experts.is_on and not is_awaited
        if may_move_experts and (op := self.experts.next_op(now, state.next_step_id)) is not None:
            return self._sent(state, barrier_plan(state, op), PlanDraft(state.table.num_ranks), now)
        state.is_decode_set_unsent |= state.decode_set.update()
        draft = PlanDraft(state.table.num_ranks)
        grant_decodes(state, draft, self._settings.ahead_pages(state.group), self._retraction.give_way)
        probed = self._poison.probing(state)
        if self._preemption is not None and not self.flush.is_wanted and probed is None:
            self._preemption.make_room(state, draft, prefill)
        self._add_chunks(state, draft, prefill, probed)
        if state.hosts and not (draft.chunks or len(state.decode_set) or state.in_flight) and self.loads.let_go(state):
            # Prefills waited for pages that were loaded for others: nothing else would wake them.
            self._add_chunks(state, draft, prefill, probed)
        self._limits.planned(now, len(draft.admits), len(self.queue))
        is_empty = not draft.chunks and not len(state.decode_set)
        if is_empty:
            self._retraction.unblock(state)
        elif state.table.num_ranks > 1:
            self._retraction.unblock_ranks(state, draft)
        if is_empty and not state.releases and not is_heartbeat and not self.loads.need_plan(state):
            return None
        expected_us = self.estimate.expect_us(most_tokens_of_a_rank(state, draft))
        plan = plan_of(state, draft, expected_us)
        if state.hosts:
            plan = replace(plan, saves=state.take_saves(), loads=tuple(self.loads.take_moves()))
        return self._sent(state, plan, draft, now)

    def joined(self, results: PySequence[StepResult]) -> StepResult:
        """Results of all data-parallel ranks, one each, as the one that process() takes: its slots are the table's.

        Raises PROTOCOL_VIOLATION as process(). Pages whose transfers are over can be granted again.
        """
        return results[0] if self._state is None else joined_in(self._state, results)

    def process(self, result: StepResult) -> Outputs:
        """Takes a result, settles it, and returns take_outputs(); raises as both do."""
        self.take_result(result)
        self.settle_results()
        return self.take_outputs()

    def take_result(self, result: StepResult) -> None:
        """Takes the tokens of a result. Results of other epochs are dropped.

        All else waits for settle_results(), so that routers have the tokens before it. Between the two anything but
        plan() may be called.

        Raises MeshError if the worker has diverged (a gap, rows that are not the plan's, ids outside the vocabulary):
        begin a new epoch then.
        """
        state = self._state
        if state is None or result.epoch != state.epoch:
            self.counters.stale_results += 1
            return
        step = state.in_flight.answered(result)
        if result.loaded_ops:
            self.loads.loaded(state, result.loaded_ops)
        prompts = self._reader.read(state, step, result, self._stop_watch, self._outputs)
        self._unsettled.append(_Unsettled(step, result, prompts))

    def settle_results(self) -> None:
        """Brings cache, estimates and counters up to the results that were taken, and checks the pages.

        Raises MeshError as check_pages() does: begin a new epoch then.
        """
        state = self._state
        while state is not None and self._unsettled:
            self._settle(state, *self._unsettled.popleft())

    # -- inside

    def _settle(self, state: EpochState, step: PlannedStep, result: StepResult, prompts: PySequence[Prefilled]) -> None:
        share_prompts(state, prompts)
        self.handovers.processed(state)
        self._retraction.requeue_answered(state)
        self._decode_reserve.stepped()
        self.flush.processed(result.step_id)
        if self.experts.is_on:
            self.experts.processed(result)
        if len(result.expert_loads) and not result.expert_rows:
            # Workers on GPUs count their picks, and not the rows that come: reading those would cost every step time.
            self.counters.expert_load.add(self.experts.rows_by_rank(result.expert_loads), REPORT_STEPS)
        self.counters.processed(step, result)
        device_us = (result.device_end_ns - result.device_start_ns) / 1000
        if step.num_tokens and device_us > 0:
            self.token_time.observe(step.num_tokens, device_us, self.estimate.expect_us(step.num_tokens))
            self.estimate.observe(step.num_tokens, device_us)
        check_pages(state, self.counters, is_strict=self._settings.check_invariants, retract=self._retraction.leave)

    def _stored_of(self, group: GroupInfo) -> tuple[StoredPrefixes, ...]:
        """Prefixes in the store of each data-parallel rank, or of all: those of the epoch before, if its KV is of use
        to these workers. Empty: there is no store, or its content is not to be remembered."""
        tiers = self._settings.tiers_of(group)
        if tiers is None or not group.has_kv_store or not tiers.stored_tokens:
            self._stored, self._stored_by = (), None
        elif self._stored_by is None or not group.has_store_of(self._stored_by):
            # Ranks that share a store find each other's pages.
            num = 1 if group.kv_store_id else group.dp_size
            most = max(1, tiers.stored_tokens // num)
            self._stored = tuple(StoredPrefixes(group.page_size, most) for _ in range(num))
            self._stored_by = group
        return self._stored

    def _finish(
        self, sequence: Sequence, ending: SequenceEnd, error: MeshError | None = None, num_output: int | None = None
    ) -> None:
        """Ends a live request wherever it is in its life."""
        state = self._state
        if sequence.lifecycle is Lifecycle.WAITING:
            self.queue.remove(sequence)
        elif state is not None and sequence.lifecycle is Lifecycle.RUNNING:
            state.leave(sequence)
        elif state is not None:
            del state.retracting[sequence.retracted_from]
        sequence.lifecycle = Lifecycle.FINISHED
        self._stop_watch.unwatch(sequence.end_ids)
        self.submissions.end(sequence)
        self.deadlines.ended(sequence)
        self._poison.ended(sequence)
        self._observer.finished(sequence, ending.reason)
        self.counters.finished[ending.reason] = self.counters.finished.get(ending.reason, 0) + 1
        self._outputs.finished.append(Finished.of(sequence, ending, error, num_output))

    def _add_chunks(self, state: EpochState, draft: PlanDraft, prefill: Prefill, probed: Sequence | None) -> None:
        step_tokens = self._settings.step_tokens(state.group)
        draft.token_budgets = [step_tokens - num for num in state.decode_set.num_by_rank]
        prefill.add_chunks(state, draft, may_admit=not self.flush.is_wanted, only=probed)

    def _expire(self, now: float) -> None:
        for sequence in self.deadlines.due(now):
            self._finish(sequence, SequenceEnd(FinishReason.ERROR), deadline_error())

    def _sent(self, state: EpochState, plan: StepPlan, draft: PlanDraft, now: float) -> StepPlan:
        enter_in_flight(state, plan, draft, now)
        self.handovers.planned(state, plan.step_id)
        self.counters.planned(draft.num_chunk_tokens)
        return plan
