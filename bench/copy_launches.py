"""Launches of steps beside loads of KV: what a thread that starts copies costs the thread that launches.

    python bench/copy_launches.py

No GPU: the driver is a stand-in in C, whose copies take --copy-us each, one after the other. It waits for room where a
stream has --queue copies, as CUDA's does. A launch is --ops small operations of torch, each of which lets the
interpreter's lock go; one begins every 5 ms while --loads loads of --copies copies run. `loop`: copies started by a
loop in C (`CopyLoop`); `python`: one by one from Python, with the lock, by the same pace or by the one given. Prints
JSON: ms of launches, and the time of the loads over that of the copies alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from radixmesh.daemons.worker.cuda.host_tier.copy_calls import (
    NUM_FIELDS,
    CopyCalls,
    CopyLoop,
    compiled_loop,
    one_by_one,
    paced,
)

# One stream. An event is the number of copies that were started before it.
_DRIVER = r"""
#include <time.h>
static long long copy_ns, most, started, free_ns;
static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static void until(long long end) {
    struct timespec t = {end / 1000000000LL, end % 1000000000LL};
    while (now() < end) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0);
}
void begin(long long ns, long long num) { copy_ns = ns; most = num; started = free_ns = 0; }
int cuMemcpy2DAsync_v2(const void *copy, void *stream) {
    long long call = now() + 1500;
    until(free_ns - most * copy_ns);
    while (now() < call) {}
    if (free_ns < now()) free_ns = now();
    free_ns += copy_ns;
    return 0;
}
int cuEventCreate(void **event, unsigned flags) { *event = __builtin_malloc(8); return 0; }
int cuEventRecord(long long *event, void *stream) { *event = free_ns; return 0; }
int cuEventSynchronize(long long *event) { until(*event); return 0; }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copy-us", type=float, default=22.0, help="1 MiB at 48 GB/s")
    parser.add_argument("--queue", type=int, default=512)
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--copies", type=int, default=1024, help="of a load: a chat of 8k tokens")
    parser.add_argument("--ops", type=int, default=80)
    parser.add_argument("--python-paces", type=int, nargs="+", default=[128, 256])
    args = parser.parse_args()
    torch.set_num_threads(1)
    driver = _driver()
    ways: dict[str, Callable[[], CopyCalls]] = {"loop": lambda: CopyLoop(compiled_loop(), driver)}
    for pace in args.python_paces:
        ways[f"python, pace {pace}"] = lambda pace=pace: one_by_one(_by_python(driver, pace))
    found: dict[str, object] = {"alone": _summary(_launches(args.ops, _forever_for(0.5)))}
    for name, way in ways.items():
        driver.begin(int(1000 * args.copy_us), args.queue)
        found[name] = _beside(way(), args)
    print(json.dumps({**vars(args), **found}))


def _driver() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "driver.so")
        source.write_text(_DRIVER)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*compiler, "-O2", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
        driver = ctypes.CDLL(str(library))
    driver.begin.argtypes = (ctypes.c_longlong, ctypes.c_longlong)
    return driver


def _by_python(driver: ctypes.CDLL, pace: int) -> Callable[[int, int], None]:
    """As the fallback of `driver_calls`: calls keep the interpreter's lock, waits for events let it go."""
    function = ctypes.PyDLL(driver._name, handle=driver._handle).cuMemcpy2DAsync_v2
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    driver.cuEventSynchronize.argtypes = driver.cuEventRecord.argtypes = (ctypes.c_void_p,)

    def record() -> SimpleNamespace:
        event = ctypes.c_longlong()
        driver.cuEventRecord(ctypes.addressof(event))
        return SimpleNamespace(synchronize=lambda: driver.cuEventSynchronize(ctypes.addressof(event)))

    return paced(lambda address, stream: function(address, stream), record, pace)


def _beside(start: CopyCalls, args: argparse.Namespace) -> dict[str, float]:
    copies, is_over = np.zeros((args.copies, NUM_FIELDS), np.int64), threading.Event()
    seconds: list[float] = []

    def load() -> None:
        begin = time.perf_counter()
        for _ in range(args.loads):
            start(copies, 7)
        seconds.append(time.perf_counter() - begin)
        is_over.set()

    thread = threading.Thread(target=load)
    thread.start()
    ms = _launches(args.ops, is_over.is_set)
    thread.join()
    alone_s = args.loads * args.copies * args.copy_us * 1e-6
    return _summary(ms) | {"loads_over_copies": round(seconds[0] / alone_s, 3)}


def _launches(num_ops: int, is_over: Callable[[], bool]) -> list[float]:
    ints, ms = torch.zeros(64), []
    while not is_over():
        begin = time.perf_counter()
        for _ in range(num_ops):
            ints.add_(1)
        ms.append(1000 * (time.perf_counter() - begin))
        time.sleep(0.005)
    return ms


def _forever_for(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() > until


def _summary(ms: list[float]) -> dict[str, float]:
    return {
        "launches": len(ms),
        "mean_ms": round(float(np.mean(ms)), 2),
        "p90_ms": round(float(np.quantile(ms, 0.9)), 2),
        "most_ms": round(max(ms), 2),
    }


if __name__ == "__main__":
    main()
