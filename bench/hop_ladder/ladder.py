"""Everything that one run measures on, at one step time: daemons, an engine in this process, the rungs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from hop_ladder.one_process import OneProcess
from hop_ladder.processes import ROOT, Processes
from hop_ladder.rungs import EngineRung, Prompt, RouterRung, Rung, ServeRung
from hop_ladder.serve_stream import ServeStream
from hop_ladder.step_link import ExecuteLink, StepLink, ThreadLink
from radixmesh.client import AsyncClient
from radixmesh.daemons.router.peers.local_text import LOAD_AFTER_S
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.text_codec import Limits as CodecLimits
from radixmesh.daemons.runtime.tokenize.text_codec import TextCodec, TextItem
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.backends import load_model
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.plans.executor import StepExecutor

MODEL = ROOT / "compose" / "models" / "tiny-llama"
_TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light"
)
_MAX_ENTRIES = 4096
# A tiny vocabulary, on a busy machine.
_LOADED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderSettings:
    """step_ms: every step of the simulated worker takes exactly so long, whatever is in it.

    Nothing else varies with the load then, so what differs between rungs is theirs. cores_each: as of Processes.
    num_pages: enough that no rung evicts, since the daemons' rungs share one cache and the others have their own.
    """

    step_ms: float
    transport: str = "unix"
    cores_each: int | None = None
    num_pages: int = 1 << 19

    def worker(self) -> WorkerSettings:
        return WorkerSettings(
            backend=Backend.SIMULATED,
            model=MODEL,
            num_pages=self.num_pages,
            simulated_base_us=1000 * self.step_ms,
            simulated_decode_row_us=0.0,
            simulated_decode_context_us=0.0,
            simulated_prefill_token_us=0.0,
            simulated_prefill_context_us=0.0,
        )

    def worker_flags(self) -> dict[str, object]:
        """The same, for a process."""
        worker = self.worker()
        names = [
            name for name in WorkerSettings.__dataclass_fields__ if name.startswith("simulated_") and "_us" in name
        ]
        flags: dict[str, object] = {name: getattr(worker, name) for name in names}
        return flags | {"backend": worker.backend.value, "model": MODEL, "num_pages": self.num_pages}


class Ladder:
    """Daemons that serve. Rungs are opened when the round trips are done: a worker has one holder."""

    def __init__(self, settings: LadderSettings, processes: Processes) -> None:
        self.settings = settings
        self.processes = processes
        vocabulary = self._vocabulary = Vocabulary.load(MODEL)
        self.codec = TextCodec(vocabulary, ChatTemplate.load(MODEL), CodecLimits())
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Starts a worker alone, and a mesh of one daemon of each kind."""
        start, address = self.processes.start, self.processes.address
        await start("worker_alone", "worker", self.settings.worker_flags(), has_both=True)
        await start("worker", "worker", self.settings.worker_flags())
        await start("tokenizer", "tokenizer", {"model": MODEL})
        await start("detokenizer", "detokenizer", {"model": MODEL})
        await start("scheduler", "scheduler", {"workers": address("worker")})
        peers = {f"{name}s": address(name) for name in ("tokenizer", "detokenizer", "scheduler")}
        await start("router", "router", peers)
        await start("router_with_text", "router", peers | {"tokenizer_path": MODEL})
        await asyncio.sleep(LOAD_AFTER_S + _LOADED_S)

    def thread_link(self) -> ThreadLink:
        """A worker of its own on a thread of this process."""
        settings = self.settings.worker()
        model = load_model(settings)
        executor = StepExecutor(
            model.runner, num_slots=settings.num_slots, max_tokens_per_step=settings.max_tokens_per_step
        )
        return ThreadLink(executor, self._vocabulary.identity.eos_ids)

    def execute_link(self, transport: str) -> ExecuteLink:
        """A stream to the worker that no scheduler holds."""
        addresses = self.processes.addresses["worker_alone"]
        return ExecuteLink(next(a for a in addresses if a.startswith("unix:") == (transport == "unix")), "hops")

    @asynccontextmanager
    async def rungs(self) -> AsyncIterator[list[Rung]]:
        """From no boundary to all of them."""
        pid, address = self.processes.pid, self.processes.address
        scheduler = {name: pid(name) for name in ("scheduler", "worker")}
        router = {"router": pid("router"), **scheduler}
        mesh = {"tokenizer": pid("tokenizer"), "detokenizer": pid("detokenizer"), **router}
        async with AsyncExitStack() as stack:
            alone = await stack.enter_async_context(self._engine(self.thread_link()))
            split = await stack.enter_async_context(self._engine(self.execute_link(self.settings.transport)))
            client = await stack.enter_async_context(AsyncClient([address("router")]))
            local = await stack.enter_async_context(AsyncClient([address("router_with_text")]))
            serve = ServeStream(address("scheduler"))
            await serve.open()
            stack.push_async_callback(serve.close)
            yield [
                EngineRung(name="one_process", adds="nothing: no gRPC", pids={}, engine=alone),
                EngineRung(
                    name="worker", adds="Execute", pids={"worker": self.processes.pid("worker_alone")}, engine=split
                ),
                ServeRung(name="scheduler", adds="Serve (ids only)", pids=scheduler, serve=serve),
                RouterRung(name="router_ids", adds="Generate (ids only)", pids=router, client=client, is_text=False),
                RouterRung(
                    name="local_text",
                    adds="text in the router (--tokenizer-path)",
                    pids=scheduler | {"router": pid("router_with_text")},
                    client=local,
                    is_text=True,
                ),
                RouterRung(name="mesh", adds="Encode, Detokenize (text)", pids=mesh, client=client, is_text=True),
            ]

    def prompts(self) -> Iterator[Prompt]:
        """Texts of about one length that share no prefix."""
        for number in self._numbers:
            text = f"{number * 7919 % 1_000_003} {_TEXT}"
            yield Prompt(text, self.codec.encode([TextItem(text=text)])[0].ids.tolist())

    def _engine(self, link: StepLink) -> OneProcess:
        vocabulary = self._vocabulary
        table = DecoderTable(family_of(vocabulary), vocabulary.vocab_size, Limits(), EntryBudget(_MAX_ENTRIES))
        planner = SchedulerSettings(workers=("in-process",)).planner_settings()
        return OneProcess(link, self.codec, table, planner)


@asynccontextmanager
async def running_ladder(settings: LadderSettings, folder: Path) -> AsyncIterator[Ladder]:
    """A ladder whose daemons serve; none is left behind."""
    async with Processes(folder, settings.transport, cores_each=settings.cores_each) as processes:
        ladder = Ladder(settings, processes)
        await ladder.start()
        yield ladder
