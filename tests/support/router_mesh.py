"""Routers among real tokenizers and detokenizers and made-up schedulers, in one process, over unix sockets.

Any of them can be killed (its streams break as they do when a process dies) and started again at its address.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from radixmesh.client import AsyncClient
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.detokenizer.config import DetokenizerSettings
from radixmesh.daemons.detokenizer.daemon import DetokenizerDaemon
from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.messages import OpenEntry, TokenBatch
from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime
from radixmesh.daemons.runtime.model_folder.fingerprint import tokenizer_fingerprint
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.daemons.runtime.sampling import output_seed
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.tokenizer.config import TokenizerSettings
from radixmesh.daemons.tokenizer.daemon import TokenizerDaemon
from radixmesh.router.v1 import router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2_grpc
from support.fake_scheduler import FakeScheduler, made_up_token

TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
VOCABULARY = Vocabulary.load(TINY)
CONTEXT = 512
PROMPT_OF_TESTS = (5, 6, 7, 8)
MODEL = common_pb2.ModelIdentity(
    name="tiny-llama",
    model_fingerprint="f00d",
    tokenizer_fingerprint=tokenizer_fingerprint(TINY),
    sampler_version=1,
    vocab_size=VOCABULARY.identity.vocab_size,
    max_total_len=CONTEXT,
    eos_ids=pack_ints(VOCABULARY.identity.eos_ids),
)


class Member:
    """One daemon of the mesh: a server that can be killed and started again."""

    def __init__(self, address: str, build: Callable[[Runtime], Daemon | None], name: str) -> None:
        self.address = address
        self.daemon: Daemon | None = None
        self._build = build
        self._name = name
        self._server: MeshServer | None = None
        self._progress: Progress | None = None
        self._failed: asyncio.Future[None] | None = None

    async def start(self) -> None:
        progress, metrics = Progress(), Metrics()
        server = MeshServer(HealthService(progress), metrics.count_error)
        self._failed = asyncio.get_running_loop().create_future()
        runtime = Runtime(
            name=self._name,
            instance_id=f"{self._name}-{id(server)}",
            progress=progress,
            metrics=metrics,
            server=server,
            failed=self._failed,
        )
        self.daemon = self._build(runtime)
        await server.start([self.address])
        if self.daemon is not None:
            await self.daemon.load()
        progress.loaded()
        self._server, self._progress = server, progress

    async def kill(self) -> None:
        """As far as peers can see, the process is gone. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)
            if self.daemon is not None:
                await self.daemon.close()
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()

    def drain(self) -> None:
        assert self._progress is not None
        self._progress.drain()

    async def restart(self) -> None:
        await self.kill()
        await self.start()


class RouterMesh:
    """tokenizers, detokenizers, schedulers, routers: members; fakes: the schedulers' servicers, which outlive kills."""

    def __init__(
        self,
        folder: Path,
        counts: tuple[int, int, int, int],
        settings: dict[str, object],
        model: Path = TINY,
        identity: common_pb2.ModelIdentity = MODEL,
        other: tuple[Path, common_pb2.ModelIdentity] | None = None,
    ) -> None:
        """other: the model of the last detokenizer and the last scheduler, where that is another one."""
        num_tokenizers, num_detokenizers, num_schedulers, num_routers = counts
        self.fakes = [FakeScheduler(identity) for _ in range(num_schedulers)]
        models = [model] * num_detokenizers
        if other is not None:
            models[-1], self.fakes[-1].model = other
        self.tokenizers = [
            Member(f"unix:{folder}/tok{i}", lambda rt: TokenizerDaemon(rt, TokenizerSettings(model=model)), "tokenizer")
            for i in range(num_tokenizers)
        ]
        self.detokenizers = [
            Member(
                f"unix:{folder}/detok{i}",
                lambda rt, of=of: DetokenizerDaemon(rt, DetokenizerSettings(model=of)),  # type: ignore[misc]
                "detokenizer",
            )
            for i, of in enumerate(models)
        ]
        self.schedulers = [
            Member(f"unix:{folder}/sched{i}", _builder(fake), "scheduler") for i, fake in enumerate(self.fakes)
        ]
        router_settings = RouterSettings(
            tokenizers=tuple(member.address for member in self.tokenizers),
            detokenizers=tuple(member.address for member in self.detokenizers),
            schedulers=tuple(member.address for member in self.schedulers),
            **settings,  # type: ignore[arg-type]
        )
        self.routers = [
            Member(f"unix:{folder}/router{i}", lambda rt: RouterDaemon(rt, router_settings), "router")
            for i in range(num_routers)
        ]

    @property
    def members(self) -> list[Member]:
        return [*self.tokenizers, *self.detokenizers, *self.schedulers, *self.routers]

    def router(self, i: int = 0) -> Router:
        daemon = self.routers[i].daemon
        assert isinstance(daemon, RouterDaemon)
        return daemon.router

    def client(self, **more: float) -> AsyncClient:
        return AsyncClient([member.address for member in self.routers], **more)

    @asynccontextmanager
    async def stub(self, i: int = 0) -> AsyncIterator[router_pb2_grpc.RouterServiceAsyncStub]:
        async with open_channel(self.routers[i].address) as channel:
            yield router_pb2_grpc.RouterServiceStub(channel)

    @asynccontextmanager
    async def admin(self, i: int = 0) -> AsyncIterator[router_pb2_grpc.RouterAdminServiceAsyncStub]:
        async with open_channel(self.routers[i].address) as channel:
            yield router_pb2_grpc.RouterAdminServiceStub(channel)

    async def settle(self) -> None:
        """Waits until nothing is left of any request, anywhere; fails if something stays."""
        async with asyncio.timeout(60):
            while any(fake.num_running for fake in self.fakes) or any(
                self.router(i).num_streams
                or len(self.router(i).journal)
                or self.router(i).journal.num_bytes
                or self.router(i).schedulers.num_waiting
                or self.router(i).detokenizers.num_waiting
                or any(link.num_running for link in self.router(i).schedulers.links)
                or any(link.num_entries or link.num_owed for link in self.router(i).detokenizers.all_links)
                for i in range(len(self.routers))
            ):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def router_mesh(
    *,
    tokenizers: int = 1,
    detokenizers: int = 1,
    schedulers: int = 1,
    routers: int = 1,
    model: Path = TINY,
    identity: common_pb2.ModelIdentity = MODEL,
    other: tuple[Path, common_pb2.ModelIdentity] | None = None,
    **settings: object,
) -> AsyncIterator[RouterMesh]:
    with tempfile.TemporaryDirectory(prefix="rm") as folder:
        counts = (tokenizers, detokenizers, schedulers, routers)
        mesh = RouterMesh(Path(folder), counts, settings, model, identity, other)
        try:
            await asyncio.gather(*(member.start() for member in mesh.members))
            for i in range(routers):
                await connected(mesh.router(i))
            yield mesh
        finally:
            await asyncio.gather(*(member.kill() for member in reversed(mesh.members)))


async def connected(router: Router) -> None:
    async with asyncio.timeout(60):
        while not all(link.is_connected for link in (*router.schedulers.links, *router.detokenizers.links)):
            await asyncio.sleep(0.005)


async def live_through_deaths(mesh: RouterMesh, seed: int, run: Callable[[range], Awaitable[object]]) -> None:
    """Kills ten members of a mesh, with two routers, at random, and starts them again; run: with seeds of its requests,
    again and again meanwhile, and once when all are back."""
    rng = random.Random(seed)
    for fake in mesh.fakes:
        fake.step_s = 0.004

    async def kill_some() -> None:
        for _ in range(10):
            await asyncio.sleep(rng.uniform(0.01, 0.08))
            member = rng.choice(mesh.members)
            await member.kill()
            await asyncio.sleep(rng.uniform(0, 0.05))
            await member.start()

    killer = asyncio.create_task(kill_some())
    first = 1000 * seed
    while not killer.done():
        await run(range(first, first + 16))
        first += 20
    await killer
    for i in range(2):
        await connected(mesh.router(i))
    await run(range(4))
    await mesh.settle()


def oracle_ids(prompt: Sequence[int], seed: int, max_tokens: int, *, index: int = 0) -> list[int]:
    """Output of the made-up schedulers, alone and undisturbed."""
    ids: list[int] = []
    prompt_bytes = pack_ints(prompt)
    while len(ids) < max_tokens:
        ids.append(made_up_token(MODEL, prompt_bytes, output_seed(seed, index), len(ids)))
        if ids[-1] in VOCABULARY.identity.eos_ids:
            break
    return ids


def oracle_text(ids: Sequence[int], prompt: Sequence[int], stops: Sequence[str] = ()) -> tuple[str, list[int], str]:
    """Text, ids that count and the stop string found, from one detokenizer entry that nobody disturbs."""
    table = DecoderTable(family_of(VOCABULARY), VOCABULARY.vocab_size, Limits(), EntryBudget(1))
    table.open(OpenEntry(handle=1, prompt_tail_ids=prompt[-16:], stops=stops, eos_ids=VOCABULARY.identity.eos_ids))
    text = ""
    for i, token in enumerate(ids):
        batch = TokenBatch(
            handles=[1],
            first_indexes=[i],
            counts=[1],
            finals=[i + 1 == len(ids)],
            ids=[token],
            min_id=token,
            max_id=token,
        )
        deltas, failures = table.push(batch)
        assert not failures, failures
        for delta in deltas:
            text += delta.text
            if delta.stop is not None:
                return text, list(ids[: delta.stop.num_tokens]), delta.stop.stop
    return text, list(ids), ""


def _builder(fake: FakeScheduler) -> Callable[[Runtime], Daemon | None]:
    def build(runtime: Runtime) -> None:
        runtime.server.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, fake)

    return build
