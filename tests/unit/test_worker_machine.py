"""Random valid plans against a brute-force model: tokens, records and page accounting agree after every step."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.plans import ALPHABET, Steps, admit, chunk, grant, simulated_executor

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import PageCopy, Release
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation

NUM_PAGES, NUM_SLOTS, MAX_LEN = 40, 4, 24


class _Slot:
    """The model's view of a request: plain lists."""

    def __init__(self, generation, prompt, seed, max_len):
        self.generation = generation
        self.prompt = prompt
        self.seed = seed
        self.max_len = max_len
        self.tokens = list(prompt)
        self.computed = 0
        self.pages = []
        self.num_cached_pages = 0


class WorkerMachine(RuleBasedStateMachine):
    """A scheduler that plans at random but never breaks a rule, and a model of pages as lists of tokens."""

    @initialize(page_size=st.sampled_from((1, 3, 4)))
    def start(self, page_size):
        self.page_size = page_size
        self.executor = simulated_executor(
            page_size=page_size, num_pages=NUM_PAGES, num_slots=NUM_SLOTS, max_total_len=MAX_LEN
        )
        self.steps = Steps(self.executor)
        self.epoch = 1
        self.slots = {}
        self.contents = {page: [] for page in range(NUM_PAGES)}
        self.generations = dict.fromkeys(range(NUM_PAGES), 0)
        self.decodes = []
        self.last_generation = dict.fromkeys(range(NUM_SLOTS), 0)

    @rule(data=st.data())
    def run_plans(self, data):
        choose = random.Random(data.draw(st.integers(0, 2**32)))
        for _ in range(5):
            self._step(choose)
            self.records_hold_what_was_written()
            self.pages_are_counted_right()

    def _step(self, choose):
        parts = {"releases": [], "admits": [], "grants": {}, "page_copies": [], "chunks": []}
        self._release(choose, parts)
        self._admit(choose, parts)
        self._grant(choose, parts)
        self._chunk(choose, parts)
        decodes = [
            slot
            for slot, held in self.slots.items()
            if held.computed == len(held.tokens) - 1 and slot not in {entry.slot for entry in parts["chunks"]}
        ]
        decodes = choose.sample(decodes, choose.randint(0, len(decodes)))
        parts["grants"] = [grant(slot, pages) for slot, pages in parts["grants"].items()]
        is_unchanged = decodes == self.decodes
        self.decodes = decodes
        result = self.steps.run(None if is_unchanged else decodes, **parts)
        self._check(result, decodes, parts["chunks"])

    @rule()
    def restart(self):
        """A new scheduler: slots are gone, pages are not."""
        self.epoch += 1
        self.executor.begin_epoch(self.epoch)
        self.steps = Steps(self.executor, self.epoch)
        self.slots, self.decodes = {}, []
        self.last_generation = dict.fromkeys(range(NUM_SLOTS), 0)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def break_a_rule(self, data):
        """Granting a held page is refused, whoever holds it; the invariants see that nothing changed."""
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        if self.slots[slot].pages:
            with pytest.raises(MeshError):
                self.steps.run(decodes=[], grants=[grant(slot, [data.draw(st.sampled_from(self.slots[slot].pages))])])

    @invariant()
    def records_hold_what_was_written(self):
        if not hasattr(self, "executor"):
            return
        records = self.executor.records
        for page, ids in self.contents.items():
            assert records.ids[page, : records.filled[page]].tolist() == ids
            assert records.generations[page] == self.generations[page]

    @invariant()
    def pages_are_counted_right(self):
        if not hasattr(self, "executor"):
            return
        users = [0] * NUM_PAGES
        for held in self.slots.values():
            for page in held.pages:
                users[page] += 1
        assert self.executor.table.page_users.tolist() == users

    def _release(self, choose, parts):
        for slot in list(self.slots):
            if choose.random() < 0.15:
                parts["releases"].append(Release(slot=slot, generation=self.slots.pop(slot).generation))

    def _admit(self, choose, parts):
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.slots]
        if not free or choose.random() < 0.4:
            return
        slot = choose.choice(free)
        max_len = choose.randint(4, MAX_LEN)
        prompt = [choose.choice((10, 11)) for _ in range(choose.randint(1, max_len - 1))]
        self.last_generation[slot] += choose.randint(1, 3)
        held = _Slot(self.last_generation[slot], prompt, choose.choice((None, 5, 6)), max_len)
        chain = self._cached_chain(prompt)
        cached_len = len(chain) * self.page_size
        copied = self._partial_copy(choose, prompt, cached_len, parts, slot)
        held.pages, held.num_cached_pages = list(chain), len(chain)
        held.computed = cached_len + copied
        self.slots[slot] = held
        sampling = Sampling(temperature=0.0 if held.seed is None else 0.8, seed=held.seed)
        parts["admits"].append(
            admit(
                slot,
                prompt,
                generation=held.generation,
                sampling=sampling,
                max_total_len=max_len,
                cached_len=held.computed,
                cached_pages=chain,
                cached_page_generations=[self.generations[page] for page in chain],
            )
        )

    def _cached_chain(self, prompt):
        """Full pages whose contents are those of the prompt from its start; any page of equal KV will do."""
        chain, prefixes = [], self._prefixes()
        while (len(chain) + 1) * self.page_size < len(prompt):
            want = tuple(prompt[: (len(chain) + 1) * self.page_size])
            if want not in prefixes:
                break
            chain.append(prefixes[want])
        return chain

    def _partial_copy(self, choose, prompt, cached_len, parts, slot):
        """Sometimes copies the start of a full page that goes on like the prompt into a granted one."""
        source = self._prefixes_starting(prompt[:cached_len])
        for page, ids in source:
            same = 0
            while same < len(ids) and cached_len + same < len(prompt) - 1 and ids[same] == prompt[cached_len + same]:
                same += 1
            free = self._free_pages(parts)
            if 0 < same < self.page_size and free and choose.random() < 0.8 and page not in free[:1]:
                target = free[0]
                parts["grants"][slot] = [target]
                parts["page_copies"].append(PageCopy(source_page=page, target_page=target, num_tokens=same))
                return same
        return 0

    def _prefixes(self):
        """Whole prefix -> a page that holds its end, of the sequences that live slots have computed."""
        prefixes = {}
        for held in self.slots.values():
            for index in range(held.computed // self.page_size):
                prefixes[tuple(held.tokens[: (index + 1) * self.page_size])] = held.pages[index]
        return prefixes

    def _prefixes_starting(self, before):
        found = []
        for held in self.slots.values():
            index = len(before) // self.page_size
            is_same = held.tokens[: len(before)] == before
            if is_same and held.computed > len(before) and index < len(held.pages):
                found.append((held.pages[index], held.tokens[len(before) : held.computed][: self.page_size]))
        return found

    def _free_pages(self, parts):
        """Pages that nobody holds; also those that this very plan releases, and never one that it shares or copies."""
        taken = {page for held in self.slots.values() for page in held.pages}
        taken |= {page for pages in parts["grants"].values() for page in pages}
        taken |= {copy.source_page for copy in parts["page_copies"]}
        return [page for page in range(NUM_PAGES) if page not in taken]

    def _grant(self, choose, parts):
        for slot, held in self.slots.items():
            most = MAX_LEN // self.page_size + 1 - len(held.pages) - len(parts["grants"].get(slot, []))
            count = min(choose.randint(0, 4), most)
            pages = choose.sample(free, min(count, len(free))) if (free := self._free_pages(parts)) else []
            if pages:
                parts["grants"][slot] = [*parts["grants"].get(slot, []), *pages]
        for slot, pages in parts["grants"].items():
            self.slots[slot].pages += pages
            for page in pages:
                self.contents[page] = []
                self.generations[page] += 1
        for copy in parts["page_copies"]:
            self.contents[copy.target_page] = self.contents[copy.source_page][: copy.num_tokens]

    def _chunk(self, choose, parts):
        for slot, held in self.slots.items():
            room = len(held.pages) * self.page_size - held.computed
            left = min(len(held.tokens) - held.computed, room)
            is_decode = held.computed == len(held.tokens) - 1
            if left > 0 and choose.random() < (0.2 if is_decode else 0.9):
                parts["chunks"].append(chunk(slot, choose.randint(1, left)))

    def _check(self, result, decodes, chunks):
        counts, ids = result.counts.tolist(), result.ids.tolist()
        for slot in decodes:
            self._take(slot, 1, counts, ids)
        for entry in chunks:
            held = self.slots[entry.slot]
            if held.computed + entry.length == len(held.tokens):
                self._take(entry.slot, entry.length, counts, ids)
            else:
                self._write(held, entry.length)
        assert (counts, ids) == ([], [])

    def _take(self, slot, length, counts, ids):
        held = self.slots[slot]
        has_page = len(held.pages) * self.page_size >= len(held.tokens)
        count = counts.pop(0)
        assert count == int(has_page and len(held.tokens) < held.max_len)
        if count:
            self._write(held, length)
            options = {} if held.seed is None else {"temperature": 0.8, "seed": held.seed}
            (expected,) = simulated_continuation(held.tokens, 1, alphabet=ALPHABET, **options)
            token = ids.pop(0)
            assert token == expected, f"slot {slot} at {len(held.tokens)}"
            held.tokens.append(token)

    def _write(self, held, length):
        for position in range(held.computed, held.computed + length):
            page = held.pages[position // self.page_size]
            assert len(self.contents[page]) == position % self.page_size
            self.contents[page].append(held.tokens[position])
        held.computed += length


WorkerMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWorkerMachine = WorkerMachine.TestCase
