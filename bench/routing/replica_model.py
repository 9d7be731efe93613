"""A replica in virtual time: continuous batching, chunked prefill, a bounded prefix cache that reports its changes, and
in-flight prefix deduplication, all as a scheduler does it."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from radixmesh.daemons.router.placement.cache_view import CacheChange, Insert
from radixmesh.daemons.router.placement.prompt_keys import BLOCK
from radixmesh.daemons.router.placement.replicas import ReplicaLoad

# As a scheduler has by default: of one request in a step, and of a step.
_CHUNK = 512
STEP_TOKENS = 2048
_SLOTS = 64
# As a scheduler: planning/admission/prefill.py.
_MOST_PASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: base, and for each decode row and each uncached token."""

    base: float = 0.035
    row: float = 0.00025
    token: float = 0.0002

    def of(self, rows: int, tokens: int) -> float:
        return self.base + self.row * rows + self.token * tokens

    def slowed(self, factor: float) -> StepCost:
        return StepCost(base=factor * self.base, row=factor * self.row, token=factor * self.token)


@dataclass(slots=True, eq=False)
class Job:
    """One request. blocks: ids of the prompt's whole blocks, as hashable keys chained from the start."""

    ids: bytes
    blocks: list[bytes]
    num_output: int
    sequence: int = 0
    arrived: float = 0.0
    first_token: float = 0.0
    done: float = 0.0
    hit: int = 0
    num_held: int = 0
    to_prefill: int = 0
    to_decode: int = 0
    on_done: object = None

    @property
    def num_prompt(self) -> int:
        return len(self.ids) // 4


class BlockCache:
    """Blocks of 32 tokens in a tree by prefix, least recently used leaves out first, those in use never."""

    def __init__(self, num_tokens: int) -> None:
        self.capacity = num_tokens // BLOCK
        self._nodes: OrderedDict[bytes, int] = OrderedDict()  # The least recently used first; key -> node number.
        self._used: dict[bytes, int] = {}
        self._next = 1
        self.reserved = 0
        self.inserts: list[Insert] = []
        self.evicted: list[int] = []

    @property
    def num_free(self) -> int:
        return self.capacity - len(self._nodes) - self.reserved

    @property
    def num_cached(self) -> int:
        return len(self._nodes)

    def num_held(self, blocks: list[bytes]) -> int:
        """Blocks of the prompt that are cached."""
        return next((index for index, key in enumerate(blocks) if key not in self._nodes), len(blocks))

    def match(self, blocks: list[bytes]) -> int:
        """Blocks of the prompt that are cached; they become the most recently used."""
        count = self.num_held(blocks)
        for key in reversed(blocks[:count]):
            self._nodes.move_to_end(key)
        return count

    def hold(self, blocks: list[bytes], change: int) -> None:
        for key in blocks:
            self._used[key] = self._used.get(key, 0) + change
            if not self._used[key]:
                del self._used[key]

    def make_room(self, count: int) -> bool:
        """Evicts until so many blocks are free; False if what is in use does not let it."""
        if self.num_free >= count:
            return True
        victims = []
        free = self.num_free
        for key in self._nodes:
            if free >= count:
                break
            if key not in self._used:
                victims.append(key)
                free += 1
        if free < count:
            return False
        for key in victims:
            self.evicted.append(self._nodes.pop(key))
        return True

    def insert(self, blocks: list[bytes], ids: bytes) -> None:
        """The prompt's KV is there; room was made before."""
        parent = 0
        for index, key in enumerate(blocks):
            node = self._nodes.get(key)
            if node is None:
                node, self._next = self._next, self._next + 1
                self._nodes[key] = node
                part = ids[4 * BLOCK * index : 4 * BLOCK * (index + 1)]
                self.inserts.append(Insert(node=node, parent=parent, ids=part, namespace="", weights_version=0))
            parent = node
        for key in reversed(blocks):
            self._nodes.move_to_end(key)

    def take_changes(self) -> tuple[list[Insert], list[int]]:
        changes = self.inserts, self.evicted
        self.inserts, self.evicted = [], []
        return changes


@dataclass(slots=True, eq=False)
class ReplicaModel:
    """step() runs one step and says how long it takes."""

    cost: StepCost
    cache: BlockCache
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    revision: int = 0
    last_sequence: int = 0
    prefilled: int = 0
    chunk_tokens: int = _CHUNK
    passed_over: tuple[Job | None, int] = (None, 0)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self.last_sequence = max(self.last_sequence, job.sequence)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def step(self, now: float) -> tuple[float, list[Job], list[Job]]:
        """Seconds of the step that begins now; jobs with their first token and jobs that are done at its end."""
        decodes = [job for job in self.running if not job.to_prefill]
        chunks = self._chunks(STEP_TOKENS - len(decodes))
        num_tokens = sum(chunks.values())
        seconds = self.cost.of(len(decodes), num_tokens)
        self.prefilled += num_tokens
        started: list[Job] = []
        for job, length in chunks.items():
            job.to_prefill -= length
            self._cache_computed(job)
            if not job.to_prefill:
                job.first_token = now + seconds
                started.append(job)
        done: list[Job] = []
        for job in (*decodes, *started):
            job.to_decode -= 1
            if job.to_decode <= 0:
                job.done = now + seconds
                done.append(job)
        for job in done:
            self.running.remove(job)
            self.cache.hold(job.blocks, -1)
            self.cache.reserved -= job.num_output // BLOCK + 1
        return seconds, started, done

    def load(self) -> ReplicaLoad:
        """As a scheduler tells it."""
        return ReplicaLoad(
            submit_sequence=self.last_sequence,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_tokens=sum(job.num_prompt for job in self.waiting),
            free_tokens=max(0, self.cache.num_free) * BLOCK,
            cached_tokens=self.cache.num_cached * BLOCK,
            token_us=1e6 * self.cost.token,
        )

    def changes(self) -> list[CacheChange]:
        """The cache's changes since the last call."""
        inserts, evicted = self.cache.take_changes()
        if not inserts and not evicted:
            return []
        # Children go before their parents, whatever was evicted first.
        self.revision += 1
        gone = sorted(evicted, reverse=True)
        return [
            CacheChange(revision=self.revision, inserts=inserts),
            CacheChange(revision=self.revision, evicted=gone),
        ]

    def _chunks(self, budget: int) -> dict[Job, int]:
        """The next chunks of those that are prefilled, then of those that are admitted, as a scheduler plans them
        (planning/admission/prefill.py)."""
        chunks: dict[Job, int] = {}
        prefilled = [job for job in self.running if job.to_prefill]
        share = min(budget, sum(min(job.to_prefill, self.chunk_tokens) for job in prefilled))
        for job in self._in_turn(prefilled):
            if share > 0:
                chunks[job] = min(job.to_prefill, share)
                share -= chunks[job]
                budget -= chunks[job]
        oldest = next((job for job in prefilled if job.to_prefill > self.chunk_tokens), None)
        self.passed_over = (oldest, self.passed_over[1] * (oldest is self.passed_over[0]) + 1)
        if oldest is None or oldest in chunks:
            self.passed_over = (None, 0)
        parked: list[Job] = []
        awaited: dict[Job, int] = {}
        while budget > 0 and self.waiting and len(self.running) < _SLOTS:
            job = self.waiting.popleft()
            hit = self.cache.match(job.blocks)
            leader = self._leader_of(job, hit)
            if leader is not None:
                parked.append(job)
                awaited[leader] = max(awaited.get(leader, 0), _num_common(job, leader))
                continue
            # The last token is always computed.
            hit = min(hit, (job.num_prompt - 1) // BLOCK)
            self.cache.hold(job.blocks[:hit], 1)
            room = len(job.blocks) - hit + job.num_output // BLOCK + 1
            if not self.cache.make_room(room):
                self.cache.hold(job.blocks[:hit], -1)
                self.waiting.appendleft(job)
                break
            self.cache.reserved += room
            job.hit = job.num_held = hit
            job.to_prefill = job.num_prompt - hit * BLOCK
            job.to_decode = job.num_output
            self.running.append(job)
            chunks[job] = min(job.to_prefill, budget, self.chunk_tokens)
            budget -= chunks[job]
        self.waiting.extendleft(reversed(parked))
        for job, blocks in awaited.items():
            # Tokens that are left of the step go to prefixes that others wait for.
            planned = job.num_prompt - job.to_prefill + chunks.get(job, 0)
            end = blocks * BLOCK if job.num_prompt - blocks * BLOCK > self.chunk_tokens else job.num_prompt
            more = min(budget, end - planned)
            if more > 0:
                chunks[job] = chunks.get(job, 0) + more
                budget -= more
        return chunks

    def _in_turn(self, prefilled: list[Job]) -> list[Job]:
        """Those that end with their chunk, then those that most wait for, of equals the oldest."""
        long = [job for job in prefilled if job.to_prefill > self.chunk_tokens]
        if len(long) > 1:
            leaders = [self._leader_of(job, self.cache.num_held(job.blocks)) for job in self.waiting]
            oldest, times = self.passed_over
            long.sort(key=lambda job: (job is not oldest or times < _MOST_PASSES, -leaders.count(job)))
        return [job for job in prefilled if job.to_prefill <= self.chunk_tokens] + long

    def _leader_of(self, job: Job, hit: int) -> Job | None:
        """The running job that is to compute the prompt's next block: this one waits, and finds it cached."""
        if hit >= len(job.blocks) or hit >= (job.num_prompt - 1) // BLOCK:
            return None
        for other in self.running:
            if other.to_prefill and len(other.blocks) > hit and other.blocks[hit] == job.blocks[hit]:
                return other
        return None

    def _cache_computed(self, job: Job) -> None:
        computed = (job.num_prompt - job.to_prefill) // BLOCK
        new = job.blocks[job.num_held : computed]
        self.cache.reserved -= len(new)
        self.cache.insert(job.blocks[:computed], job.ids)
        self.cache.hold(new, 1)
        job.num_held = max(job.num_held, computed)


def _num_common(job: Job, other: Job) -> int:
    """Blocks that two prompts have in common."""
    pairs = enumerate(zip(job.blocks, other.blocks, strict=False))
    return next((index for index, (one, its) in pairs if one != its), min(len(job.blocks), len(other.blocks)))
