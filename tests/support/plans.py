"""Plans for tests of the worker: a thin scheduler that owns pages and slots and can be told to do anything."""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import as_ints, empty_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, StepPlan, StepResult
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet

VOCAB_SIZE = 100
ALPHABET = Alphabet.of(VOCAB_SIZE, special_ids=(0,), eos_ids=(1, 2))


def simulated_executor(
    *,
    page_size=1,
    num_pages=256,
    num_slots=8,
    max_total_len=64,
    max_tokens_per_step=128,
    alphabet=ALPHABET,
    runner_class=SimulatedRunner,
    blobs=None,
    grammars=None,
    num_host_pages=0,
    load_token_us=0.0,
):
    """A fresh simulated worker without a daemon around it, in epoch 1."""
    runner = runner_class(
        page_size=page_size,
        num_pages=num_pages,
        vocab_size=VOCAB_SIZE,
        max_total_len=max_total_len,
        alphabet=alphabet,
        latency=LatencyModel(per_loaded_token=load_token_us),
        clock=VirtualClock(),
    )
    if num_host_pages:
        runner.add_host_pool(num_host_pages * page_size * runner.kv_token_bytes)
    executor = StepExecutor(
        runner, num_slots=num_slots, max_tokens_per_step=max_tokens_per_step, blobs=blobs, grammars=grammars
    )
    executor.begin_epoch(1)
    return executor


def admit(slot, prompt_ids, *, generation=1, sampling=None, max_total_len=64, **fields):
    """An admit with the usual defaults: greedy, room to spare."""
    return Admit(
        slot=slot,
        generation=generation,
        request_id=f"r{slot}.{generation}",
        prompt_ids=as_ints(prompt_ids),
        max_total_len=max_total_len,
        sampling=sampling or Sampling(temperature=0.0),
        **{name: as_ints(value) if isinstance(value, list) else value for name, value in fields.items()},
    )


def grant(slot, pages):
    return Grant(slot=slot, pages=as_ints(list(pages)))


def chunk(slot, length):
    return Chunk(slot=slot, length=length)


class Steps:
    """Numbers plans and runs them on an executor."""

    def __init__(self, executor: StepExecutor, epoch: int = 1) -> None:
        self.executor = executor
        self.epoch = epoch
        self.next_step = 1

    def plan(self, decodes=None, **parts) -> StepPlan:
        """The next plan; `decodes` replaces the decode set."""
        decode_set = None if decodes is None else as_ints(list(decodes))
        parts = {name: tuple(value) if isinstance(value, list) else value for name, value in parts.items()}
        return StepPlan(epoch=self.epoch, step_id=self.next_step, decode_set=decode_set, **parts)

    def run(self, decodes=None, **parts) -> StepResult:
        result = self.executor.run(self.plan(decodes, **parts))
        self.next_step += 1
        return result


def fingerprint(executor: StepExecutor) -> tuple[object, ...]:
    """Everything of a worker that a plan may change, comparable."""
    table, records = executor.table, executor.records
    arrays = [
        table.generations,
        table.is_occupied,
        table.computed_len,
        table.total_len,
        table.num_pages,
        table.page_users,
        table.tokens,
        table.page_tables,
        table.decode_set,
        records.generations,
        records.filled,
        records.previous_pages,
        records.previous_generations,
        records.namespace_indexes,
        records.ids,
        executor.runner.kv,
    ]
    return (records.namespaces, executor.last_step, *[np.asarray(array).tobytes() for array in arrays])


__all__ = [
    "ALPHABET",
    "VOCAB_SIZE",
    "Steps",
    "admit",
    "as_ints",
    "chunk",
    "empty_ints",
    "fingerprint",
    "grant",
    "simulated_executor",
]


def first_plan(epoch=1, slot=0, pages=range(40), prompt_ids=(5, 6, 7, 8)):
    """Step 1 of an epoch: admits a prompt and computes it whole."""
    return StepPlan(
        epoch=epoch,
        step_id=1,
        admits=(admit(slot, list(prompt_ids)),),
        grants=(grant(slot, pages),),
        chunks=(chunk(slot, len(prompt_ids)),),
    )
