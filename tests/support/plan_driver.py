"""Sends one script of plans to any executor: chunked prefills beside decodes, with many ways to sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, PageCopy, Release, StepPlan, StepResult
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.step_handle import StepHandle
from support.rounding import largest_logprob_error

PROMPTS = [list(range(20, 20 + n)) for n in (1, 5, 17, 30)]
GREEDY = Sampling(temperature=0.0)
OPTIONS = [
    GREEDY,
    Sampling(temperature=0.8, seed=7, top_k=20, top_p=0.9),
    Sampling(temperature=1.0, seed=2**63 + 5),
    Sampling(temperature=0.0, repetition_penalty=1.3, logit_bias=((40, 5.0),)),
    Sampling(temperature=0.7, seed=3, min_p=0.05, frequency_penalty=0.5, presence_penalty=0.2),
    Sampling(temperature=0.0, num_top_logprobs=3, prompt_logprobs=True),
]
# Sizes that take little of Triton's interpreter.
PLAIN_OPTIONS = [OPTIONS[0], OPTIONS[2], OPTIONS[5]]
# Those whose tokens are the largest logits: where a little rounding decides nothing.
GREEDY_OPTIONS = [OPTIONS[0], OPTIONS[5], OPTIONS[0], OPTIONS[0], OPTIONS[5]]
_NO_PAGES = np.zeros(0, np.int32)


class PlanDriver:
    """Plans are launched `lag` ahead of the one that is finished. tokens, pages: by slot."""

    def __init__(self, runner: ModelRunner, *, lag: int, num_slots: int = 8, max_tokens_per_step: int = 64) -> None:
        self.executor = StepExecutor(runner, num_slots=num_slots, max_tokens_per_step=max_tokens_per_step)
        self.executor.begin_epoch(1)
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, np.ndarray] = {}
        self.results: list[StepResult] = []
        self._page_size, self._lag = runner.page_size, lag
        self._launched: deque[StepHandle[StepResult]] = deque()
        # (slot, generation) of each row.
        self._rows: deque[list[tuple[int, int]]] = deque()
        self._generations: dict[int, int] = {}
        self._decodes: list[int] = []
        self._sent: list[int] | None = None
        self._step = 0
        self._next_page = 0

    def run(
        self,
        *,
        chunk: Chunk | None = None,
        is_last: bool = False,
        admits: tuple[Admit, ...] = (),
        grants: tuple[Grant, ...] = (),
        releases: tuple[Release, ...] = (),
        copies: tuple[PageCopy, ...] = (),
    ) -> None:
        """One step: all decodes, and a chunk."""
        self._step += 1
        # As a scheduler does: plans that change nothing say nothing.
        is_sent, self._sent = self._sent == self._decodes, [*self._decodes]
        plan = StepPlan(
            epoch=1,
            step_id=self._step,
            admits=admits,
            grants=grants,
            releases=releases,
            page_copies=copies,
            chunks=() if chunk is None else (chunk,),
            decode_set=None if is_sent else np.array(self._decodes, np.int32),
        )
        self._launched.append(self.executor.launch(plan))
        slots = [*self._decodes, *([chunk.slot] if chunk is not None and is_last else [])]
        self._rows.append([(slot, self._generations[slot]) for slot in slots])
        while len(self._launched) > self._lag:
            self._take()

    def add(
        self,
        slot: int,
        prompt: list[int],
        sampling: Sampling,
        *,
        chunk_len: int,
        num_out: int,
        cached: np.ndarray = _NO_PAGES,
        copied: PageCopy | None = None,
        pages: np.ndarray | None = None,
        min_tokens: int | None = None,
        suppressed: Sequence[int] = (1, 33),
        output: Sequence[int] = (),
    ) -> None:
        """A request, its prompt in chunks; the same plan releases the one that decodes in its slot.

        output: what it had of the num_out tokens before it was retracted.
        cached: full pages that hold its beginning; copied: what of the page behind them is copied into its first own
        one. pages: its own; None: the next, in falling order.
        """
        total, cached_len = len(prompt) + num_out, len(cached) * self._page_size
        cached_len += 0 if copied is None else copied.num_tokens
        num_pages = -(-total // self._page_size) - len(cached)
        if pages is None:
            pages = np.arange(self._next_page, self._next_page + num_pages, dtype=np.int32)[::-1].copy()
            self._next_page += num_pages
        pages = pages[:num_pages]
        self.pages[slot] = np.concatenate([cached, pages])
        releases: tuple[Release, ...] = ()
        if slot in self._decodes:
            self._decodes.remove(slot)
            releases = (Release(slot=slot, generation=self._generations[slot]),)
        self._generations[slot] = self._generations.get(slot, 0) + 1
        admit = Admit(
            slot=slot,
            generation=self._generations[slot],
            request_id=f"r{slot}",
            prompt_ids=np.array(prompt, np.int32),
            output_ids=np.array(output, np.int32),
            max_total_len=total,
            sampling=sampling,
            min_tokens=(0 if sampling in PLAIN_OPTIONS else 4) if min_tokens is None else min_tokens,
            suppressed_ids=np.array(suppressed, np.int32),
            cached_len=cached_len,
            cached_pages=cached,
            cached_page_generations=self.executor.records.generations[cached],
        )
        self.tokens[slot] = list(output)
        num_tokens = len(prompt) + len(output)
        for start in range(cached_len, num_tokens, chunk_len):
            length = min(chunk_len, num_tokens - start)
            self.run(
                chunk=Chunk(slot=slot, length=length),
                is_last=start + length == num_tokens,
                admits=(admit,) if start == cached_len else (),
                grants=(Grant(slot=slot, pages=pages),) if start == cached_len else (),
                releases=releases if start == cached_len else (),
                copies=(copied,) if start == cached_len and copied is not None else (),
            )
        self._decodes.append(slot)

    def finish(self, num_steps: int) -> None:
        """Decodes, lets the first request go, and waits for everything."""
        for _ in range(num_steps):
            self.run()
        first = self._decodes.pop(0)
        self.run(releases=(Release(slot=first, generation=self._generations[first]),))
        while self._launched:
            self._take()

    def _take(self) -> None:
        result = self._launched.popleft().result()
        self.results.append(result)
        ids = iter(result.ids.tolist())
        for (slot, generation), count in zip(self._rows.popleft(), result.counts.tolist(), strict=True):
            tokens = [next(ids) for _ in range(count)]
            if generation == self._generations[slot]:
                self.tokens[slot] += tokens


def drive(
    runner: ModelRunner, *, chunk_len: int, lag: int, num_steps: int = 6, options: list[Sampling] = OPTIONS
) -> PlanDriver:
    """All of `options`, one slot each."""
    driver = PlanDriver(runner, lag=lag)
    for slot, sampling in enumerate(options):
        driver.add(slot, PROMPTS[slot % len(PROMPTS)], sampling, chunk_len=chunk_len, num_out=16 + num_steps)
    driver.finish(num_steps)
    return driver


def drive_hits(
    runner: ModelRunner, text: list[int], *, prefix_len: int, num_slots: int, chunk_len: int, lag: int
) -> PlanDriver:
    """Requests for what follows in a text, each a token later, with pages of the first one: half of the prefix for the
    second one, all for the others."""
    driver = PlanDriver(runner, lag=lag, num_slots=num_slots)
    num_steps, size = 6, runner.page_size
    for slot in range(num_slots):
        num_pages = {0: 0, 1: prefix_len // 2 // size}.get(slot, prefix_len // size)
        cached = driver.pages[0][:num_pages] if slot else _NO_PAGES
        # Logprobs of a prompt are not to be had of what is cached.
        sampling = {0: OPTIONS[5], 2: replace(OPTIONS[5], prompt_logprobs=False)}.get(slot, GREEDY)
        prompt = text[: prefix_len + 3 + slot]
        driver.add(slot, prompt, sampling, chunk_len=chunk_len, num_out=2 * num_slots + num_steps, cached=cached)
    driver.finish(num_steps)
    return driver


@cache
def logprob_tolerance(
    folder: Path, pool_dtype: torch.dtype = torch.float32, *, num_keys: int = len(PROMPTS[-1])
) -> float:
    """Largest difference of logprobs of the model in `folder`, in float32 over keys and values of that dtype."""
    from transformers import AutoModelForCausalLM  # Slow to import.

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        spread = float(model(torch.tensor([PROMPTS[-1]])).logits.std())
    return largest_logprob_error(model.config, num_keys, spread, pool_dtype)


def check_same(got: PlanDriver, want: PlanDriver, *, atol: float) -> None:
    """Tokens, logprobs within `atol` and page records."""
    assert got.tokens == want.tokens
    assert all(len(tokens) > 5 for tokens in got.tokens.values())
    for one, other in zip(got.results, want.results, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert [(p.slot, p.first_position) for p in ours] == [(p.slot, p.first_position) for p in theirs]
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a.logprobs.own, b.logprobs.own, rtol=0, atol=atol)
                np.testing.assert_allclose(a.logprobs.top, b.logprobs.top, rtol=0, atol=atol)
    assert any(result.logprobs for result in got.results) and any(result.prompt_logprobs for result in got.results)
    for a, b in zip(got.executor.snapshot()[0], want.executor.snapshot()[0], strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.filled, b.filled)
