"""Sends turns when they are due, each after its parent's answer, and keeps what it saw of every request."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from radixmesh.cli.bench.gate import Gate
from radixmesh.cli.bench.load_turn import LoadTurn, Prompt, fold_ids, next_prompt
from radixmesh.cli.bench.oracle import made_up_output
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.targets.target import Target
from radixmesh.cli.bench.workloads import IntArray

_EMPTY = np.zeros(0, np.int32)


class LoadGenerator:
    """concurrency: requests at a time; None = as many as are due. vocab_size: of the model; None = not known.

    records: of the requests sent so far. num_skipped: turns whose parent failed. Where a server tells no ids of its
    output, the next turn continues made-up ids of the same number: num_made_up counts them.
    """

    def __init__(
        self,
        target: Target,
        turns: Sequence[LoadTurn],
        *,
        concurrency: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._target = target
        self._turns = turns
        self._vocab_size = vocab_size
        self._gate = Gate(concurrency)
        self._children: dict[int, list[int]] = defaultdict(list)
        for index, turn in enumerate(turns):
            if turn.parent is not None:
                self._children[turn.parent].append(index)
        self._roots = [index for index, turn in enumerate(turns) if turn.parent is None]
        self._group: set[asyncio.Task[None]] = set()
        self.records: list[RequestRecord] = []
        self.num_skipped = 0
        self.num_made_up = 0

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    async def run(self) -> None:
        """Until every turn has ended. Cancelling it ends what runs; records keep what was seen."""
        started = time.perf_counter()
        try:
            for index in self._roots:
                self._spawn(index, None, started + self._turns[index].delay_s)
            while self._group:
                done, _ = await asyncio.wait(self._group, return_when=asyncio.FIRST_COMPLETED)
                self._group -= done
                for task in done:
                    task.result()
        finally:
            for task in self._group:
                task.cancel()
            await asyncio.gather(*self._group, return_exceptions=True)

    def _spawn(self, index: int, before: tuple[Prompt, IntArray, str] | None, due: float) -> None:
        self._group.add(asyncio.create_task(self._run_turn(index, before, due)))

    async def _run_turn(self, index: int, before: tuple[Prompt, IntArray, str] | None, due: float) -> None:
        turn = self._turns[index]
        await asyncio.sleep(due - time.perf_counter())
        prompt = turn.added if before is None else next_prompt(turn, *before)
        # Turns of one conversation lie beside each other: the older the conversation, the lower their indexes.
        await self._gate.enter(index if turn.parent is None else index - self.num_turns)
        try:
            record = RequestRecord(index=index, due=due, sent=time.perf_counter())
            self.records.append(record)
            await self._target.send(prompt, turn.out_len, record)
        finally:
            self._gate.leave()
        if record.error:
            self.num_skipped += self._count_below(index)
            return
        after = (prompt, self._answer_ids(record), record.output_text)
        for child in self._children[index]:
            self._spawn(child, after, record.ended + self._turns[child].delay_s)

    def _answer_ids(self, record: RequestRecord) -> IntArray:
        """The turn that the record's children continue."""
        if record.output_ids is not None:
            return record.output_ids
        children = self._children[record.index]
        if not children or self._turns[children[0]].added.ids is None:
            return _EMPTY
        self.num_made_up += 1
        return fold_ids(made_up_output(record.index, record.output_tokens), self._vocab_size)

    def _count_below(self, index: int) -> int:
        return sum(1 + self._count_below(child) for child in self._children[index])
