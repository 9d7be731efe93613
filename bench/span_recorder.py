"""Runs a daemon and records when functions of its step path ran, on which thread, in nanoseconds.

    python bench/span_recorder.py OUT.json radixmesh.daemons.worker --backend simulated ...

OUT.json is written when the daemon ends: spans [name, native thread id, start ns, end ns] of CLOCK_MONOTONIC, in the
order of their ends; the names of threads by id; and how long Triton took for each kernel that it compiled. A function
that the process has not is skipped. A span costs about 0.5 us.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import runpy
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

_WORKER, _CUDA = "radixmesh.daemons.worker", "radixmesh.daemons.worker.cuda"
_SCHEDULER = "radixmesh.daemons.scheduler"
# Module, name there, label. Imported when the daemon's own module has been: what needs a GPU only where there is one.
STEP_TARGETS = {
    "radixmesh.daemons.worker": (
        (f"{_WORKER}.stream.session", "ExecuteSession.receive"),
        (f"{_WORKER}.stream.session", "parse_frame"),
        (f"{_WORKER}.core", "WorkerCore._answered"),
        (f"{_WORKER}.plans.plan_runner", "PlanRunner.launch"),
        (f"{_WORKER}.plans.plan_runner", "PlanRunner._finish"),
        (f"{_WORKER}.plans.plan_runner", "plan_from_proto"),
        (f"{_WORKER}.plans.plan_runner", "result_to_proto"),
        (f"{_WORKER}.plans.executor", "StepExecutor.launch"),
        (f"{_WORKER}.plans.executor", "StepExecutor._settle"),
        (f"{_WORKER}.stream.result_stream", "ResultStream.write"),
    ),
    "radixmesh.daemons.scheduler": (
        (f"{_SCHEDULER}.scheduler_loop", "SchedulerLoop.take"),
        (f"{_SCHEDULER}.scheduler_loop", "SchedulerLoop.deliver"),
        (f"{_SCHEDULER}.planning.planner", "Planner.plan"),
        (f"{_SCHEDULER}.planning.planner", "Planner.process"),
        (f"{_SCHEDULER}.group.group_stream", "encode_plans"),
        (f"{_SCHEDULER}.group_service", "GrpcRank.write"),
        (f"{_SCHEDULER}.group.worker_stream", "parse_frame"),
        (f"{_SCHEDULER}.routers.router_streams", "RouterStreams.deliver"),
    ),
}
CUDA_TARGETS = (
    (f"{_CUDA}.device", "CudaEvent.wait"),
    (f"{_CUDA}.device", "CudaDevice.record_event"),
    (f"{_CUDA}.device", "CudaDevice.capture"),
    (f"{_CUDA}.runner", "DeviceRunner.launch"),
    (f"{_CUDA}.step.decode_steps", "DecodeSteps._stage"),
    (f"{_CUDA}.runner", "DeviceRunner.warm_up"),
    (f"{_CUDA}.step.step_graphs", "StepGraphs.replay"),
    (f"{_CUDA}.step.step_graphs", "StepGraphs.capture"),
    (f"{_CUDA}.step.prompt_steps", "PromptSteps.capture"),
    (f"{_CUDA}.step.prompt_steps", "PromptSteps.warm_up"),
    (f"{_CUDA}.step.sampling.slot_sampler", "SlotSampler.warm_up"),
    (f"{_CUDA}.load", "load_model"),
    (f"{_CUDA}.load", "create_kernels"),
    (f"{_CUDA}.load", "create_runner"),
    (f"{_CUDA}.load", "CudaDevice"),
    (f"{_CUDA}.gemm.tuning", "tune_kind"),
    ("radixmesh.kernels.gemm_sm90.gemm", "GemmSm90.prepare"),
)

_MAX_SPANS = 200_000
_spans: deque[tuple[str, int, int, int]] = deque(maxlen=_MAX_SPANS)
_threads: dict[int, str] = {}
_compiled: list[tuple[str, float, bool]] = []


def _note(label: str, start: int) -> None:
    ident = threading.get_native_id()
    if ident not in _threads:
        _threads[ident] = threading.current_thread().name
    _spans.append((label, ident, start, time.monotonic_ns()))


def _recorded(function: Callable[..., object], label: str) -> Callable[..., object]:
    if asyncio.iscoroutinefunction(function):

        async def awaited(*args: object, **kwargs: object) -> object:
            start = time.monotonic_ns()
            try:
                return await function(*args, **kwargs)
            finally:
                _note(label, start)

        return functools.wraps(function)(awaited)

    def called(*args: object, **kwargs: object) -> object:
        start = time.monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            _note(label, start)

    return functools.wraps(function)(called)


def _record(module_name: str, path: str) -> None:
    try:
        owner: object = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, _recorded(getattr(owner, name), path))
    except (ImportError, AttributeError) as error:
        print(f"not recorded: {module_name} {path}: {error}", file=sys.stderr)


def _watch_compiles() -> None:
    from triton import knobs

    def compiled(*, src: object, metadata: object, metadata_group: object, times: object, cache_hit: bool) -> None:
        _compiled.append((str(getattr(src, "name", src)), float(getattr(times, "total", 0)) * 1e-6, cache_hit))

    knobs.compilation.listener = compiled


def main() -> None:
    started = time.monotonic_ns()
    out, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    importlib.import_module(f"{module}.__main__")
    for target in STEP_TARGETS.get(module, ()):
        _record(*target)
    imported = time.monotonic_ns()
    _spans.append(("import daemon", threading.get_native_id(), started, imported))
    if "cuda" in sys.argv:
        importlib.import_module("torch")
        _spans.append(("import torch", threading.get_native_id(), imported, time.monotonic_ns()))
        imported = time.monotonic_ns()
        for target in CUDA_TARGETS:
            _record(*target)
        _watch_compiles()
        _spans.append(("import cuda backend", threading.get_native_id(), imported, time.monotonic_ns()))
    try:
        runpy.run_module(f"{module}.__main__", run_name="__main__")
    finally:
        out.write_text(json.dumps({"spans": list(_spans), "threads": _threads, "compiled": _compiled}))


if __name__ == "__main__":
    main()
