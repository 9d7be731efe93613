"""The worker as its peers see it: identity, claims, plans in flight. Lives on the event loop; steps run elsewhere.

LOADING --attach--> READY --a step died--> FAILED (the process is about to exit)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.steps.forward_shape import HAVE_CHUNKS, ONLY_DECODES
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import NoTracer, Tracer
from radixmesh.daemons.worker.core_config import CoreConfig
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.kv_transfer.transfer_figures import TransferFigures
from radixmesh.daemons.worker.kv_transfer.transfer_pins import TransferPins
from radixmesh.daemons.worker.kv_transfer.transfers import KvTransfers
from radixmesh.daemons.worker.kv_transfer.transport import KvTransport
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.files.plan_dump import PlanDump
from radixmesh.daemons.worker.plans.files.plan_recorder import PlanRecorder
from radixmesh.daemons.worker.plans.plan_runner import Answer, PlanRunner
from radixmesh.daemons.worker.plans.plans_in_flight import PlansInFlight
from radixmesh.daemons.worker.plans.retained_plans import RetainedPlans
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore
from radixmesh.daemons.worker.plans.slots.slot_traces import SlotTraces
from radixmesh.daemons.worker.profile import StepProfiler, make_profiler
from radixmesh.daemons.worker.ranks.build import build_of_worker
from radixmesh.daemons.worker.ranks.group_formation import GroupFormation
from radixmesh.daemons.worker.ranks.group_member import GroupMember, UnconnectedMember
from radixmesh.daemons.worker.stream.capabilities import add_layout, add_model, worker_hello
from radixmesh.daemons.worker.stream.epochs import EpochLedger, Holder
from radixmesh.daemons.worker.stream.step_queue import StepQueue
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

# A refusal that says why the process ends should get out before it does.
_LAST_WORDS_S = 0.2
# Times max_plans_in_flight: the plans in flight here, and all that another rank may have retained.
_MOST_COMPLETED = 3


class WorkerCore:
    """One worker. on_failed: called once when a step died, after its refusal had time to leave."""

    def __init__(
        self,
        instance_id: str,
        config: CoreConfig,
        progress: Progress,
        metrics: Metrics,
        on_failed: Callable[[BaseException], None],
        tracer: Tracer | None = None,
        member: GroupMember | None = None,
        transport: KvTransport | None = None,
    ) -> None:
        """transport: carries KV to other workers; None: there are no transfers."""
        self.member: GroupMember = member or UnconnectedMember()
        self._tracer = tracer or NoTracer()
        self.config = config
        self.ledger = EpochLedger()
        self.blobs = BlobStore(max_bytes=config.blob_store_bytes, max_blob_bytes=config.max_blob_bytes)
        self._grammars: GrammarStore | None = None
        self.pins = TransferPins()
        self._hello = make_hello(instance_id, "worker")
        self._hello.build = build_of_worker()
        self._progress = progress
        self._metrics = metrics
        self._on_failed = on_failed
        self._state = worker_pb2.WORKER_STATE_LOADING
        self._queue = StepQueue()
        self._recorder = PlanRecorder(config.record_plans) if config.record_plans is not None else None
        self.executor: StepExecutor | None = None
        self.plan_runner: PlanRunner | None = None
        self.profiler: StepProfiler | None = None
        self.holder: Holder | None = None
        self._in_flight = PlansInFlight(progress, metrics)
        self.retained = RetainedPlans(
            max_plans=2 * config.max_plans_in_flight, keeps_completed=self.member.layout.world_size > 1
        )
        self._is_draining = False
        self.transfers = KvTransfers(
            instance_id,
            staging_bytes=config.transfer_staging_bytes,
            piece_bytes=config.transfer_piece_bytes,
            transport=transport,
            run=self._queue.run,
            start=self._queue.start,
            check_holder=self.ledger.check_holder,
            received_step=lambda: self.ledger.last_received_step,
            figures=TransferFigures(metrics),
        )
        metrics.kv_quarantined_bytes.set_function(lambda: self.transfers.receiver.num_quarantined_bytes)
        metrics.kv_staging_bytes.set_function(lambda: self.transfers.staging.num_bytes)
        # Of ranks that hold the model together each has a part of every token's KV.
        keeps_kv = self.member.layout.tp_size == 1
        self.formation = GroupFormation(
            self.ledger,
            self.member,
            reset=lambda experts: self._queue.run(lambda: self._ready().reset(experts, keeps_kv=keeps_kv)),
            agree=lambda: self._queue.run(self._ready().executor.runner.formed),
        )

    def put_blob(self, blob_hash: str, data: bytes) -> bool:
        """Keeps a blob, and reads it if it is a grammar, unless guides read it when they are given an output that
        follows it: a step that admits a request finds it ready. Takes a while.

        True if it was there already. Raises what BlobStore.put() does, or INVALID_GRAMMAR.
        """
        was_known = self.blobs.put(blob_hash, data)  # Checks the hash, which names the grammar from then on.
        if self._grammars is not None and self._grammars.is_grammar(data):
            self._grammars.get(blob_hash, data)
        return was_known

    def attach(
        self, executor: StepExecutor, model: common_pb2.ModelIdentity, grammars: GrammarStore | None = None
    ) -> None:
        """The model is loaded: claims are taken from now on."""
        self._grammars = None if executor.guides.reads_blobs else grammars
        self.executor = executor
        self.profiler = make_profiler(self.config.dump_folder, self._hello.instance_id[:8])
        dump = PlanDump(self.config.dump_folder, self._hello.instance_id)
        self.plan_runner = PlanRunner(
            executor,
            dump,
            self.profiler.on_step,
            SlotTraces(self._tracer) if self._tracer.is_on else None,
            self.member.layout.dp_rank,
            self.pins,
        )
        self._hello.model.CopyFrom(model)
        self.transfers.attach(executor, model.model_fingerprint)
        self._state = worker_pb2.WORKER_STATE_READY

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.num

    @property
    def hello(self) -> common_pb2.Hello:
        return self._hello

    def worker_hello(self) -> worker_pb2.WorkerHello:
        """Hello that a scheduler reads before it claims."""
        return worker_hello(self._hello, self.ledger, self.retained, self.capabilities(), self.config.predecessor_end)

    def capabilities(self) -> worker_pb2.Capabilities:
        """State, backend and sizes of the worker; sizes are 0 while it loads."""
        self._leave_broken_group()
        config = self.config
        capabilities = worker_pb2.Capabilities(
            state=self._state,
            backend=config.backend,
            max_plans_in_flight=config.max_plans_in_flight,
            max_blob_bytes=config.max_blob_bytes,
            group_generation=self.ledger.group_generation,
            takes_alive=True,
            takes_plan_batches=True,
        )
        add_layout(capabilities, self.member)
        if self.executor is not None:
            add_model(capabilities, self.executor, self._hello.model.model_fingerprint)
            if (kv := self.transfers.format) is not None:
                capabilities.transfer_kv.CopyFrom(kv)
                capabilities.sends_behind_steps = True
        return capabilities

    def fence(self, holder: Holder, epoch: int, instance_id: str) -> None:
        """Shuts every other scheduler out at once, whatever the step thread does.

        Raises NOT_SERVING, or EPOCH_FENCED if another claim is higher.
        """
        self._progress.require_serving()
        self._ready()
        self.ledger.fence(epoch, instance_id)
        self._taken_by(holder, epoch, instance_id)

    def _leave_broken_group(self) -> None:
        """A group that lost a rank is none any more: the next scheduler forms another."""
        if self.ledger.group_generation and not self.member.is_whole:
            self.ledger.formed(0)

    def _taken_by(self, holder: Holder, epoch: int, instance_id: str) -> None:
        """`holder` has won the worker; the one before it learns that it has lost it."""
        former, self.holder = self.holder, holder
        if former is not None and former is not holder:
            log.warning("holder_fenced", epoch=epoch, instance=instance_id)
            former.fail(self.ledger.fenced())
        self.retained.begin_epoch()
        self._metrics.epoch.set(epoch)

    async def claim(self, holder: Holder, claim: worker_pb2.Claim, instance_id: str) -> None:
        """Returns once the worker is drained, its slots are free and `holder` holds it.

        Raises NOT_SERVING, GROUP_GENERATION, or EPOCH_FENCED if another claim is higher, now or by then.
        """
        self._progress.require_serving()
        runner = self._ready()
        self._leave_broken_group()
        self.ledger.claim(claim.epoch, instance_id, claim.group_generation)
        self._taken_by(holder, claim.epoch, instance_id)
        await self._queue.run(lambda: runner.begin_epoch(claim.epoch, claim.group_generation))
        self.ledger.check_holder(claim.epoch, instance_id)
        self.transfers.begin_epoch(claim.epoch)
        self.ledger.heard()  # It has waited for us until here.
        log.info("claimed", epoch=claim.epoch, instance=instance_id)

    def alive(self, holder: Holder) -> None:
        """The stream says that its scheduler lives. Counts if that is the holder."""
        if self.holder is holder:
            self.ledger.heard()

    def left(self, holder: Holder) -> None:
        """A stream ended. Plans of it that are in flight complete; slots stay until the next claim."""
        if self.holder is holder:
            self.holder = None
            self.ledger.disconnected()

    async def submit(self, holder: Holder | None, plan: worker_pb2.StepPlan, fault: Exception | None = None) -> None:
        """Queues a plan, as soon as fewer than max_plans_in_flight are. Its answer goes to `holder`, if that is one.

        None: the plan completes the broadcast of the epoch before. `fault`: met with instead of its step.
        Raises EPOCH_FENCED if somebody else claimed the worker by then: a plan of an older epoch would end the new one.
        """
        await self.submit_all(holder, [(plan, fault)])

    async def submit_all(
        self, holder: Holder | None, plans: Sequence[tuple[worker_pb2.StepPlan, Exception | None]]
    ) -> None:
        """As `submit`, of plans that follow each other, at most max_plans_in_flight: they are answered together."""
        runner, room = self._ready(), self.config.max_plans_in_flight - len(plans)
        while holder is not None and (self._is_draining or self.num_in_flight > room):
            await self._in_flight.next_answer()
        if holder is None:
            # Never behind a step: it may wait in a collective that only the fence which follows can end.
            self.check_complete(plans[0][0])
        elif holder is not self.holder:
            raise self.ledger.fenced()
        for plan, _ in plans:
            self._received(plan)
            if plan.header.shape.mode in HAVE_CHUNKS:
                log.debug("step_plan_came", step=plan.header.step_id)
        assert self.executor is not None
        ready_ns = self.executor.runner.now_ns()
        epochs = [plan.header.epoch for plan, _ in plans]
        self._queue.submit_all(
            [partial(runner.launch, plan, ready_ns, fault) for plan, fault in plans],
            lambda answers: self._answered(holder, epochs, answers),
            is_urgent=any(plan.header.shape.mode not in ONLY_DECODES for plan, _ in plans),
        )
        self._in_flight.export()

    def _received(self, plan: worker_pb2.StepPlan) -> None:
        if self._recorder is not None:
            self._recorder.record(plan)
        header, ledger = plan.header, self.ledger
        is_next = header.epoch == ledger.highest_epoch and header.step_id == ledger.last_received_step + 1
        self._in_flight.received(plan, will_run=is_next)
        if is_next:
            ledger.last_received_step = header.step_id
            self.retained.received(plan)

    def check_complete(self, plan: worker_pb2.StepPlan) -> None:
        """Raises EPOCH_FENCED while the holder lives, PROTOCOL_VIOLATION or STEP_GAP unless `plan` is its next one."""
        if not self.ledger.may_complete(has_unfinished=self.retained.has_unfinished):
            raise self.ledger.fenced()
        expected = self.ledger.last_received_step + 1
        if plan.header.epoch != self.ledger.highest_epoch or self.ledger.highest_epoch == 0:
            message = f"complete carries epoch {plan.header.epoch}, the last one here is {self.ledger.highest_epoch}"
            raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
        most = _MOST_COMPLETED * self.config.max_plans_in_flight
        if self.num_in_flight >= most:
            message = f"{most} plans wait here: no scheduler has more in flight; fence the worker"
            raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
        if plan.header.step_id != expected:
            raise MeshError(
                ErrorReason.ERROR_REASON_STEP_GAP,
                f"complete carries step {plan.header.step_id}: step {expected} is the first that is missing here",
                {"expected": str(expected), "got": str(plan.header.step_id)},
            )

    async def snapshot(self, epoch: int, instance_id: str) -> Sequence[worker_pb2.SnapshotCacheResponse]:
        """Page records after all received plans, for the holder only. Raises EPOCH_FENCED or NOT_SERVING."""
        runner = self._ready()
        self.ledger.check_holder(epoch, instance_id)
        messages = await self._queue.run(runner.snapshot)
        self.ledger.check_holder(epoch, instance_id)
        return messages

    async def fetch_pages(self, request: worker_pb2.FetchPagesRequest) -> int:
        """Fills host pages from the store of KV; how many. Raises as StoreTier.fetch(), NOT_SERVING or UNSUPPORTED."""
        executor = self._ready().executor
        host = executor.host
        if host is None or host.store is None:
            message = "the worker has no store of KV: set its --kv-store, or fetch nothing"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "kv_store"})
        return await host.store.fetch(
            request,
            run=self._queue.run,
            check_holder=lambda: self.ledger.check_holder(request.epoch, request.instance_id),
            received_step=lambda: self.ledger.last_received_step,
            loading=host.loading_host_pages,
            weights_version=lambda: executor.weights_version,
        )

    async def profile(self, action: worker_pb2.ProfileAction, num_steps: int) -> str:
        """Starts or stops a trace; path of the stopped one. Raises UNSUPPORTED or INVALID_ARGUMENT."""
        self._ready()
        profiler = self.profiler
        assert profiler is not None
        return await self._queue.run(lambda: profiler.act(action, num_steps))

    async def drain(self) -> None:
        """Takes no more plans; returns when those in flight are answered. The holder's stream ends with NOT_SERVING."""
        self._is_draining = True
        while self.num_in_flight:
            await self._in_flight.next_answer()
        if self.holder is not None:
            message = "the worker leaves: continue on another one"
            self.holder.fail(MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": "draining"}))

    def close(self) -> None:
        """No further steps run, and nobody waits for other ranks any more: threads that do would outlive the loop."""
        self.member.abort()
        self.transfers.close()
        self._queue.close()
        if self._recorder is not None:
            self._recorder.close()

    def _ready(self) -> PlanRunner:
        if self.plan_runner is None or self._state != worker_pb2.WORKER_STATE_READY:
            state = worker_pb2.WorkerState.Name(self._state).removeprefix("WORKER_STATE_").lower()
            message = f"the worker is {state}: retry later"
            raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": state})
        return self.plan_runner

    def _answered(self, holder: Holder | None, epochs: Sequence[int], answers: Sequence[Answer]) -> None:
        """On the event loop, in step order. Answers leave before anything is measured."""
        if holder is not None:
            for answer in answers:
                if answer.response is not None:
                    holder.deliver(answer.response)
        for epoch, answer in zip(epochs, answers, strict=True):
            self._count(holder, epoch, answer)
        self._in_flight.wake()
        # Behind the stream's task, which writes them in the loop's next turn.
        asyncio.get_running_loop().call_soon(self._measure, answers)

    def _count(self, holder: Holder | None, epoch: int, answer: Answer) -> None:
        self._in_flight.answered(epoch, answer.step_id)
        if epoch == self.ledger.highest_epoch:
            self.retained.completed(answer.step_id)
            self.ledger.heard()  # Its silence begins now: it has waited until here.
        if answer.result is not None:
            if epoch == self.ledger.highest_epoch:
                self.ledger.last_completed_step = answer.step_id
        elif answer.refusal is not None:
            self._metrics.refusals.labels(answer.refusal.reason_name).inc()
            log.warning("plan_refused", epoch=epoch, step=answer.step_id, error=str(answer.refusal))
        if answer.died is not None:
            self._fail(answer.died, answer.step_id)
        if answer.lost is not None and holder is not None:
            # The scheduler may not see that rank as lost: it forms the group again.
            holder.fail(MeshError(ErrorReason.ERROR_REASON_GROUP_LOST, f"a rank is lost: {answer.lost}"))

    def _measure(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if answer.result is not None:
                assert self.executor is not None, "it ran the step"
                self._in_flight.completed(answer.result, self.executor.runner.draft_seconds)
        self._in_flight.export()

    def _fail(self, error: BaseException, step_id: int) -> None:
        self._state = worker_pb2.WORKER_STATE_FAILED
        log.error("step_died", step=step_id, error=repr(error))
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._on_failed, error)
