"""Cost of a prefix cache: match, lock, insert and evict on trees of 10k to 4M tokens, adoption of 1M, and memory.

    python bench/prefix_cache.py --caches radix trie --tokens 10000 100000 1000000 4000000 > result.json

Prints one JSON object. Every cache and size runs in a process of its own, so that its resident memory is its own. The
tree is that of a chat service: prompts begin with one of 16 shared texts of 300 tokens; a conversation of some turns
follows, of which each prompt repeats the former ones. Times are microseconds a call, one thread; compare them by ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace, PrefixCache, make_prefix_cache

NAMESPACE = Namespace("", 1)
VOCABULARY = 128_000
SHARED_LEN = 300
TURN_LEN = 250
NUM_TURNS = 4
LONG_LEN = 100_000


class Tree:
    """A cache filled to `num_tokens` by chat prompts, with a free list, as the scheduler's page pool would keep it."""

    def __init__(self, name: str, num_tokens: int, page_size: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.cache: PrefixCache = make_prefix_cache(name, page_size=page_size, num_pages=num_tokens // page_size)
        self.free = self.rng.permutation(self.cache.num_pages).astype(np.int32)
        self.prompts: list[IntArray] = []
        self._shared = [self.tokens(SHARED_LEN) for _ in range(16)]
        self._unused: Iterator[IntArray] = self._conversations()

    def fill(self) -> None:
        for prompt in self._unused:
            if len(self.free) * self.page_size < len(prompt):
                return
            self.insert(prompt)
            self.prompts.append(prompt)

    def tokens(self, num: int) -> IntArray:
        return self.rng.integers(0, VOCABULARY, num).astype(np.int32)

    def new_prompt(self) -> IntArray:
        return next(self._unused)

    def insert(self, ids: IntArray) -> float:
        """Inserts as a request does that found its cached prefix; returns how long insert() took in us."""
        num = len(ids) // self.page_size
        ids = ids[: num * self.page_size]
        known = self.cache.match(NAMESPACE, ids)
        self.cache.lock(known)
        missing = num - len(known.pages)
        if missing > len(self.free):
            self.free = np.concatenate([self.free, self.cache.evict(missing - len(self.free))])
        pages = np.concatenate([known.pages, self.free[len(self.free) - missing :]])
        self.cache.unlock(known)
        began = time.perf_counter_ns()
        num_known = self.cache.insert(NAMESPACE, ids, pages).num_known
        spent = time.perf_counter_ns() - began
        assert num_known == len(known.pages), (num_known, len(known.pages))
        self.free = self.free[: len(self.free) - missing]
        return spent / 1e3

    def evict(self, num: int) -> float:
        """Evicts `num` pages and inserts as many below a shared beginning; returns how long evict() took in us."""
        began = time.perf_counter_ns()
        pages = self.cache.evict(num)
        spent = time.perf_counter_ns() - began
        self.free = np.concatenate([self.free, pages])
        beginning = self._shared[int(self.rng.integers(16))]
        num_more = num * self.page_size - (-len(beginning)) % self.page_size
        self.insert(np.concatenate([beginning, self.tokens(num_more)]))
        return spent / 1e3

    def _conversations(self) -> Iterator[IntArray]:
        while True:
            prompt = self._shared[int(self.rng.integers(16))]
            for _ in range(NUM_TURNS):
                prompt = np.concatenate([prompt, self.tokens(int(self.rng.integers(1, 2 * TURN_LEN)))])
                yield prompt


def measure_operations(tree: Tree, num_samples: int) -> dict[str, dict[str, float]]:
    """Percentiles of every operation on the full tree."""
    cache, prompts = tree.cache, tree.prompts
    times: dict[str, list[float]] = {name: [] for name in ("match_hit", "match_miss", "lock", "unlock")}
    sums: list[int] = []
    for _ in range(num_samples):
        prompt = prompts[int(tree.rng.integers(len(prompts)))]
        times["match_hit"].append(_timed(lambda ids=prompt: cache.match(NAMESPACE, ids)))
        match = cache.match(NAMESPACE, prompt)
        sums.append(len(match.pages))
        times["lock"].append(_timed(lambda held=match: cache.lock(held)))
        times["unlock"].append(_timed(lambda held=match: cache.unlock(held)))
        other = tree.tokens(1000)
        times["match_miss"].append(_timed(lambda ids=other: cache.match(NAMESPACE, ids)))
    # Steady state: each step evicts what it needs and inserts what has finished.
    for name, num in (("evict_16_pages", 16), ("evict_256_pages", 256)):
        times[name] = [tree.evict(num) for _ in range(num_samples)]
    times["insert"] = [tree.insert(tree.new_prompt()) for _ in range(num_samples)]
    result = {name: _percentiles(samples) for name, samples in times.items()}
    result["match_hit"]["mean_pages"] = round(float(np.mean(sums)), 1)
    return result


def measure_long(tree: Tree, num_samples: int) -> dict[str, dict[str, float]]:
    """A prompt of 100k tokens, cached whole, and cut once half way."""
    ids = tree.tokens(LONG_LEN)
    times = {"insert_100k": [tree.insert(ids)]}
    times["match_100k"] = [_timed(lambda: tree.cache.match(NAMESPACE, ids)) for _ in range(num_samples)]
    times["match_50k_of_100k_first"] = [_timed(lambda: tree.cache.match(NAMESPACE, ids[: LONG_LEN // 2]))]
    return {name: _percentiles(samples) for name, samples in times.items()}


def measure_tree(name: str, num_tokens: int, page_size: int, seed: int, num_samples: int) -> dict[str, object]:
    Tree(name, 2000, 1, seed).fill()  # Imports, and what the allocators keep.
    before = _resident_mib()
    tree = Tree(name, num_tokens, page_size, seed)
    began = time.perf_counter()
    tree.fill()
    fill_s = time.perf_counter() - began
    num_cached = tree.cache.num_cached
    bookkeeping = _object_mib(tree)
    memory = _resident_mib() - before - bookkeeping
    operations = measure_operations(tree, num_samples)
    if num_tokens >= 10 * LONG_LEN:
        operations |= measure_long(tree, 50)
    return {
        "cache": name,
        "tokens": num_tokens,
        "prompts": len(tree.prompts),
        "cached_pages": num_cached,
        "fill_s": round(fill_s, 2),
        "memory_mib": round(memory, 1),
        "memory_bytes_per_token": round(memory * 2**20 / (num_cached * page_size), 1),
        "us": operations,
    }


def measure_adopt(name: str, shape: str, num_tokens: int, seed: int) -> dict[str, object]:
    records = _records(shape, num_tokens, seed)
    make_prefix_cache(name, page_size=1, num_pages=8)
    before = _resident_mib()
    cache = make_prefix_cache(name, page_size=1, num_pages=num_tokens)
    began = time.perf_counter()
    taken = cache.adopt(records, [""], 1)
    spent = time.perf_counter() - began
    gc.collect()
    return {
        "cache": name,
        "shape": shape,
        "tokens": num_tokens,
        "adopted": len(taken),
        "adopt_s": round(spent, 2),
        "memory_mib": round(_resident_mib() - before, 1),
    }


def _records(shape: str, num: int, seed: int) -> PageRecords:
    """One-token pages in random order: prompts that share half of one, one chain, or one token and its leaves."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(num).astype(np.int32)
    previous, ones = np.full(num, -1, np.int32), np.ones(num, np.int32)
    if shape == "prompts":
        rows = order.reshape(-1, 200)
        previous[rows[:, 1:]] = rows[:, :-1]
        previous[rows[1:, 0]] = rows[0, 99]
    elif shape == "chain":
        previous[order[1:]] = order[:-1]
    else:
        previous[order[1:]] = order[0]
    return PageRecords(
        first_page=0,
        generations=ones,
        filled=ones,
        previous_pages=previous,
        previous_generations=ones,
        namespace_indexes=ones - 1,
        weights_versions=ones,
        ids=rng.permutation(num).astype(np.int32),
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e3


def _percentiles(samples: list[float]) -> dict[str, float]:
    if not samples:
        return {"n": 0}
    return {
        "p50": round(float(np.percentile(samples, 50)), 2),
        "p99": round(float(np.percentile(samples, 99)), 2),
        "max": round(max(samples), 2),
        "n": len(samples),
    }


def _resident_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def _object_mib(tree: Tree) -> float:
    """Memory of the benchmark's own prompts."""
    return (sum(prompt.nbytes + 112 for prompt in tree.prompts)) / 2**20


def _in_own_process(arguments: list[str]) -> dict[str, object]:
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", default=["radix", "trie"], help="names in PREFIX_CACHES")
    parser.add_argument("--tokens", nargs="+", type=int, default=[10_000, 100_000, 1_000_000, 4_000_000])
    parser.add_argument("--adopt-tokens", type=int, default=1_000_000, help="a multiple of 200; 0 = not measured")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["tree", "prompts", "chain", "leaves"], help="one part, in this process")
    return parser.parse_args()


def main() -> None:
    options = _parse()
    name, num, seed = options.caches[0], options.tokens[0], options.seed
    if options.only == "tree":
        print(json.dumps(measure_tree(name, num, options.page_size, seed, options.samples)))
        return
    if options.only:
        print(json.dumps(measure_adopt(name, options.only, num, seed)))
        return
    common = ["--seed", str(seed), "--samples", str(options.samples), "--page-size", str(options.page_size)]
    trees, adoptions = [], []
    for name in options.caches:
        for num in options.tokens:
            size = ["--tokens", str(num)]
            trees += [_in_own_process([*common, "--only", "tree", "--caches", name, *size])]
        for shape in ("prompts", "chain", "leaves") if options.adopt_tokens else ():
            size = ["--tokens", str(options.adopt_tokens)]
            adoptions += [_in_own_process([*common, "--only", shape, "--caches", name, *size])]
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    command = " ".join(["python", "bench/prefix_cache.py", *sys.argv[1:]])
    about = {"command": command, "machine": _processor(), "versions": versions, "page_size": options.page_size}
    print(json.dumps({**about, "seed": seed, "trees": trees, "adopt": adoptions}, indent=1))


if __name__ == "__main__":
    main()
