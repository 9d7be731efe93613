"""The schedulers: who serves which model, where outputs go, and outputs that wait for one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from radixmesh.daemons.router.peers.schedulers.link_placement import LinkPlacement
from radixmesh.daemons.router.peers.schedulers.link_table import LinkTable
from radixmesh.daemons.router.peers.schedulers.output_moves import OutputMoves
from radixmesh.daemons.router.peers.schedulers.remote_prefills import RemotePrefills
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.peers.schedulers.served_models import ServedModel, pick_model, served_models
from radixmesh.daemons.router.placement.move_costs import MoveWay
from radixmesh.daemons.router.placement.placement import Decision
from radixmesh.daemons.router.queue.turns import QueueTurns
from radixmesh.daemons.router.queue.waiting_outputs import QueueBounds, WaitingOutputs
from radixmesh.daemons.router.requests.intake.model_aliases import ModelAliases
from radixmesh.daemons.router.requests.journal import MAX_ATTEMPT_NO, Output, OutputState, Request
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.name_watch import PeerPool
from radixmesh.scheduler.v1 import scheduler_pb2

_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_ABORT_TIMEOUT_S = 2.0
# Turns in the queue at each tick, beside those that events bring.
_ROUNDS_A_TICK = 16
# Outputs looked at that have waited long: each asks every scheduler, and thousands come at once.
_LATE_A_TICK = 256


class SchedulerPool(PeerPool):
    """Places outputs on schedulers by model, then by placement's policy; an output is on one of them, or waits here.

    wait_s: how long an output waits. migrate_after_s: how long a group may not serve before its outputs leave for one
    that does. waiting: the queue of outputs that no scheduler takes now. evens_out, on_moved: see OutputMoves. clock:
    monotonic seconds.
    """

    def __init__(
        self,
        make_link: Callable[[str], SchedulerLink],
        placement: LinkPlacement,
        *,
        wait_s: float,
        migrate_after_s: float,
        aliases: ModelAliases | None = None,
        waiting: WaitingOutputs | None = None,
        evens_out: bool = True,
        prefill_min_tokens: int = 256,
        prefill_timeout_s: float = 60.0,
        on_moved: Callable[[str, int], None] = lambda reason, count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_link = make_link
        self.placement = placement
        self._aliases = aliases or ModelAliases({})
        self._wait_s = wait_s
        self._clock = clock
        self._moves = OutputMoves(
            self, placement, leave_after_s=migrate_after_s, evens_out=evens_out, on_moved=on_moved, clock=clock
        )
        self.prefills = RemotePrefills(
            placement, least_tokens=prefill_min_tokens, timeout_s=prefill_timeout_s, clock=clock
        )
        self._links: dict[str, SchedulerLink] = {}
        # An empty queue is false.
        self.waiting = WaitingOutputs(QueueBounds(), clock=clock) if waiting is None else waiting
        self.turns = QueueTurns(self, self.waiting, clock)
        self._changed = asyncio.Event()
        self._served: list[ServedModel] = []
        self._served_of = -1

    @property
    def links(self) -> tuple[SchedulerLink, ...]:
        return tuple(self._links.values())

    @property
    def table(self) -> LinkTable:
        """Facts of all links."""
        return self.placement.table

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def add(self, address: str) -> None:
        """Connects to a scheduler. Idempotent. Raises INVALID_ARGUMENT for text that is no address."""
        if address not in self._links:
            link = self._links[address] = self._make_link(address)
            self.placement.add(link)
            link.start()

    async def remove(self, address: str) -> None:
        """Disconnects; its outputs move to others, or wait. Raises INVALID_ARGUMENT for one that was not added."""
        link = self.link(address)
        del self._links[address]
        self.table.remove(link)
        for output in link.outputs():
            self.take_from(link, output)
        await asyncio.sleep(
            0
        )  # The aborts leave before the stream does, as a rule; else the scheduler's grace ends them.
        await link.close()
        await self.placement.remove(link)
        self.place_waiting()

    def can_remove(self, address: str) -> bool:
        link = self._links.get(address)  # None: an operator has removed it.
        return link is not None and not link.is_connected

    def drain(self, address: str, *, moves_outputs: bool = False) -> int:
        """Sends no new outputs there; how many of those that run have moved, 0 unless moves_outputs.

        Raises INVALID_ARGUMENT for one that was not added.
        """
        link = self.link(address)
        link.is_draining = True
        return self._moves.leave(link) if moves_outputs else 0

    def move(self, *, request_id: str = "", source: str = "", target: str = "", most: int = 0) -> int:
        """Moves running outputs of a request or of all, from one scheduler or from any: see OutputMoves.move().

        Returns how many have moved. Raises INVALID_ARGUMENT for an address that was not added.
        """
        links = [self.link(source)] if source else self.links
        return self._moves.move(links, to=self.link(target) if target else None, request_id=request_id, most=most)

    async def close(self) -> None:
        self.waiting.clear()
        self.turns.close()
        await self.placement.close()
        await asyncio.gather(*(link.close() for link in self.links))

    def models(self) -> list[ServedModel]:
        """Every name heard of with the model that most serve under it, in the order of schedulers."""
        named: dict[str, ServedModel] = {}
        for model in self._served_models():
            named.setdefault(model.name, model)
        return list(named.values())

    def served(self, name: str, like: ServedIdentity | None = None) -> ServedModel | None:
        """The model of that name or alias, or the first where it is empty; None if no scheduler has announced it.

        like: preferred among several models of that name.
        """
        return pick_model(self._served_models(), self._aliases.resolve(name), like)

    def _served_models(self) -> list[ServedModel]:
        """served_models() of all links, made anew when one has other facts: every request asks several times."""
        if self.table.version != self._served_of:
            self._served_of, self._served = self.table.version, served_models(self.links)
        return self._served

    def own_name(self, name: str) -> str:
        """The name of the model that an alias stands for, or the name itself."""
        return self._aliases.resolve(name)

    def aliases_of(self, name: str) -> list[str]:
        """Further names under which a served model may be asked for."""
        return self._aliases.of(name)

    async def find_model(self, name: str, timeout_s: float, like: ServedIdentity | None = None) -> ServedModel:
        """As served(), but waits while schedulers are still to be reached.

        Raises UNKNOWN_MODEL, or NO_REPLICA if no scheduler was ever reached.
        """
        until = asyncio.get_running_loop().time() + timeout_s
        while (found := self.served(name, like)) is None:
            if not await self._may_learn_more(until):
                break
        if found is not None:
            return found
        models = self.models()
        if not models:
            message = "no scheduler has been reached yet: start one, or name one that runs with --schedulers"
            raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "scheduler"})
        served = ", ".join(model.name for model in models)
        message = f"no scheduler serves {name!r}: choose one of {served}"
        raise MeshError(ErrorReason.ERROR_REASON_UNKNOWN_MODEL, message, {"model": name})

    async def list_models(self, timeout_s: float) -> list[ServedModel]:
        """As models(), but waits for the first one while schedulers are still to be reached."""
        until = asyncio.get_running_loop().time() + timeout_s
        while not (models := self.models()):
            if not await self._may_learn_more(until):
                break
        return models

    async def _may_learn_more(self, until: float) -> bool:
        """Waits for a change of a link; False once every scheduler has been reached, or from `until` on."""
        remaining = until - asyncio.get_running_loop().time()
        are_all_known = bool(self._links) and all(link.has_ever_connected for link in self.links)
        if are_all_known or remaining <= 0:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(remaining):
                await self._changed.wait()
        return True

    def place(
        self,
        output: Output,
        among: Sequence[SchedulerLink] | None = None,
        *,
        source: SchedulerLink | None = None,
    ) -> MoveWay | None:
        """Sends an output to a scheduler, or lets it wait for one. among: those that can take it, where it is known.
        source: the one that it leaves by plan; the answer is how it goes on then."""
        assert output.scheduler is None, f"{output.request.request_id}/{output.index} is on a scheduler"
        if among is None and output not in self.waiting and self.turns.has_to_wait(output):
            self._wait(output)
            self.turns.soon()
            return None
        link, decision = self._pick(output, among) if output.attempt_no < MAX_ATTEMPT_NO else (None, None)
        if link is None:
            self._wait(output)
            return None
        if output.waiting_since is None or (output in self.waiting and output.attempt_no < 0):
            # Its turn has come: what it waited for room says nothing of the scheduler that takes it now.
            output.waiting_since = self._clock()
        self.waiting.served(output)
        way, num_lacking = None, 0
        if source is None or not output.ids:
            self.prefills.begin(output, link)
        else:
            num_lacking = self.prefills.num_lacking(output, link)
            way = self.prefills.begin_move(output, source, link)
        link.submit(output)
        self.prefills.submitted(output)
        if way is not None:
            self.prefills.costs.begin(link, link.last_sequence, way, num_lacking)
        self.placement.take_sent(link, decision)
        return way

    def _wait(self, output: Output) -> None:
        if output.state is not OutputState.WAITING:
            output.move_to(OutputState.WAITING)
        if output.waiting_since is None:
            output.waiting_since = self._clock()
        if output not in self.waiting:
            self.waiting.add(output, self.turns.line_of(output))

    def place_anew(self, output: Output) -> MeshError | None:
        """As place(), for an output that a scheduler has lost: its wait goes on, see Output.count_wait().

        The error to end it with if it has waited too long.
        """
        # Rejections from before count for nothing.
        output.num_rejections = 0
        if output.waiting_since is not None and self._clock() - output.waiting_since > self._wait_s:
            # Schedulers come and go before they take it: between two of them it never waits long enough to be noticed.
            return self.table.nobody(output, self._wait_s)
        self.place(output)
        return None

    def place_rejected(self, output: Output, link: SchedulerLink, error: MeshError) -> None:
        """Another scheduler gets an output that link would not take, or the same one later."""
        output.num_rejections += 1
        backoff = min(_MIN_BACKOFF_S * 2 ** min(output.num_rejections, 10), _MAX_BACKOFF_S)
        asked = error.metadata.get("retry_after_ms", "")
        if asked.isdecimal():
            backoff = max(backoff, min(int(asked) / 1000, _MAX_BACKOFF_S))
        output.backoff_until[link.address] = self._clock() + backoff
        if output.waiting_since is None:
            output.waiting_since = self._clock()
        self.place(output)

    def fits_elsewhere(self, output: Output, link: SchedulerLink) -> bool:
        """True if another scheduler holds an output that is too large for link: then link is not asked again."""
        output.backoff_until[link.address] = math.inf
        fitting = self.table.links(self.table.fitting(output.request).tolist())
        return any(output.backoff_until.get(other.address) != math.inf for other in fitting)

    def release(self, output: Output) -> None:
        """The output needs no scheduler any more. Tells no scheduler. Idempotent."""
        self.waiting.remove(output)
        if output.scheduler is not None:
            output.scheduler.release(output)

    def place_waiting(self) -> None:
        """Something has changed: tries again for all that wait."""
        if len(self.waiting):
            self.turns.serve_all()

    def on_submitted(self, output: Output) -> None:
        """A scheduler gets the output."""
        self.waiting.running.submitted(output.request.resolved.tenant)

    def on_left(self, link: SchedulerLink, sequence: int, output: Output) -> None:
        """The output of that submit is not at the scheduler any more."""
        self.placement.on_left(link, sequence)
        self.prefills.costs.left(link, sequence)
        self.prefills.end(output)
        self.turns.left(link, output)

    def on_first_token(self, link: SchedulerLink, sequence: int) -> None:
        """The output of that submit has gone on there."""
        self.placement.on_first_token(link, sequence)
        self.prefills.costs.first_token(link, sequence)

    def on_load(self, link: SchedulerLink) -> None:
        """A scheduler has told its load."""
        self.placement.on_load(link)
        self.turns.has_room(link)

    def on_changed(self) -> None:
        """A link was connected, or its group's state changed."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.place_waiting()

    def tick(self, now: float) -> list[tuple[Output, MeshError]]:
        """Outputs that have waited too long, with the errors to end them with. Call every 0.1 s or so."""
        self.placement.tick(now)
        self._moves.tick(now)
        self.prefills.tick(now)
        if not self.waiting:
            return []
        # All else that could let an output run is an event; backoffs and slow starts just pass. Ten thousand may wait.
        if any(link.takes_submits for link in self.links):
            self.turns.serve_all(_ROUNDS_A_TICK)
        waited = (output for output in self.waiting if now - (output.waiting_since or now) > self._wait_s)
        late = list(islice(waited, _LATE_A_TICK))
        lost = [output for output in late if not self.turns.waits_for_room(output)]
        for output in late:
            # For room it may take as long as it takes; the wait for a scheduler begins when there is none any more.
            output.waiting_since = now
        for output in lost:
            self.waiting.remove(output)
        return [(output, self.table.nobody(output, self._wait_s)) for output in lost]

    async def cancel_everywhere(self, request_id: str, tenant: str | None) -> scheduler_pb2.AbortOutcome:
        """Ends every attempt of a request, of any tenant for None, on every scheduler; the best of what they found."""
        asked = [asyncio.ensure_future(link.cancel_all(request_id, tenant)) for link in self.links if link.is_connected]
        if not asked:
            return scheduler_pb2.ABORT_OUTCOME_UNKNOWN
        done, late = await asyncio.wait(asked, timeout=_ABORT_TIMEOUT_S)
        for task in late:
            task.cancel()
        found = [task.result() for task in done if task.exception() is None]
        return min((outcome for outcome in found if outcome), default=scheduler_pb2.ABORT_OUTCOME_UNKNOWN)

    def cancel_older(self, request: Request, below_attempt: int) -> None:
        """Ends attempts below that one on every scheduler."""
        for link in self.links:
            if link.is_connected:
                link.cancel(request, below_attempt=below_attempt, is_own=False)

    def take_from(self, link: SchedulerLink, output: Output) -> None:
        """The output leaves link, which is told, and waits."""
        link.cancel(output.request, below_attempt=output.attempt + 1, index=output.index)
        link.release(output)
        if output.state is OutputState.RUNNING:
            output.count_wait(was_accepted=True)
            output.num_rejections = 0
            self._wait(output)

    def _pick(
        self, output: Output, among: Sequence[SchedulerLink] | None
    ) -> tuple[SchedulerLink | None, Decision | None]:
        """The scheduler for an output, and the decision that led there: none where a sibling's scheduler is taken."""
        rows = self.table.able(output) if among is None else self.table.rows(among)
        if not len(rows):
            return None, None
        if len(output.request.outputs) > 1:
            links = self.table.links(rows.tolist())
            for sibling in output.request.outputs:
                # Outputs of one request share their prompt's KV.
                if sibling.scheduler in links:
                    return sibling.scheduler, None
        decision = self.placement.choose(output, rows, counts_full=among is not None)
        return (None, None) if decision is None else (self.table.link(decision.row), decision)

    def has(self, link: SchedulerLink) -> bool:
        """True if the link was added, and not removed since."""
        return self._links.get(link.address) is link

    def link(self, address: str) -> SchedulerLink:
        """The link to a scheduler. Raises INVALID_ARGUMENT for one that was not added."""
        link = self._links.get(address)
        if link is None:
            message = f"no scheduler was added as {address!r}: see ListSchedulers"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "address"})
        return link
