"""A worker's steps on a GPU, of which one meets a fault of the device: a program, since nothing of CUDA works after it.

Prints JSON, what came of each plan, and leaves with 1 as the daemon does. Arguments: illegal_access or out_of_memory,
and a folder for the plan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, StepPlan
from radixmesh.daemons.runtime.steps.step_codec import plan_to_proto
from radixmesh.daemons.worker.cuda import load
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.files.plan_dump import PlanDump
from radixmesh.daemons.worker.plans.plan_runner import Answer, PlanRunner
from support.device_settings import TINY_SETTINGS
from support.plan_driver import GREEDY

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PROMPT = np.arange(20, 60, dtype=np.int32)
SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="triton",
    num_pages=2048,
    num_slots=2,
    cuda_graphs=True,
    use_pdl=True,
    tune_gemm=False,
)


def illegal_access(runner: DeviceRunner, held: list[torch.Tensor]) -> None:
    """The slots' pages lie where no memory is."""
    with torch.inference_mode():
        runner.slots.page_tables.fill_(1 << 30)
    # Steps run on another stream.
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def out_of_memory(runner: DeviceRunner, held: list[torch.Tensor]) -> None:
    """No more than what the process has can be had, and nothing of that is left: it is `held`."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    # On the stream of the steps, whose blocks are its own.
    with runner.device.in_order():
        for size in (1 << 21, 1 << 20, 1 << 14, 1 << 9):
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


FAULTS: Mapping[str, Callable[[DeviceRunner, list[torch.Tensor]], None]] = {
    "illegal_access": illegal_access,
    "out_of_memory": out_of_memory,
}


def main(fault: str, folder: Path) -> int:
    # Graphs hold the memory that they need.
    runner = load.load_cuda_runner(MODEL, replace(SETTINGS, cuda_graphs=fault == "illegal_access"))
    executor = StepExecutor(runner, num_slots=2, max_tokens_per_step=64)
    plans = PlanRunner(executor, PlanDump(folder, "instance"), lambda: None)
    plans.begin_epoch(1, 0)
    admit = Admit(
        slot=0, generation=1, request_id="r", prompt_ids=PROMPT, max_total_len=len(PROMPT) + 20, sampling=GREEDY
    )
    pages = np.arange(len(PROMPT) + 20, dtype=np.int32)
    first = {"admits": (admit,), "grants": (Grant(slot=0, pages=pages),), "chunks": (Chunk(slot=0, length=40),)}
    answers = []
    held: list[torch.Tensor] = []
    for step in range(1, 6):
        if step == 3:
            answers = [job.result() for job in answers]
            FAULTS[fault](runner, held)
        decodes = np.zeros(0 if step == 1 else 1, np.int32)
        plan = StepPlan(epoch=1, step_id=step, decode_set=decodes, **(first if step == 1 else {}))
        answers.append(plans.launch(plan_to_proto(plan), 0, None))
    print(json.dumps([told(answer if isinstance(answer, Answer) else answer.result()) for answer in answers]))
    return 1


def told(answer: Answer) -> dict[str, object]:
    """Of one plan."""
    refusal = answer.refusal
    kind = "died" if answer.died else "result" if answer.result else "refused" if refusal else "none"
    reason = refusal.reason_name if isinstance(refusal, MeshError) else ""
    return {"step": answer.step_id, "kind": kind, "reason": reason, "error": str(answer.died or "")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
