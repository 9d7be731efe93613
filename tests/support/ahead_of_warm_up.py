"""Kernels that a start compiles ahead of its warm-up, for an H200, on a machine that has none. Nothing is launched.

Run as a program without TRITON_INTERPRET: prints JSON, the number of kernels of a first pass and of a second one, how
many of them were made ready for their first launch, the number that a process beside it was asked for, and the number
of kernels that were in the cache in the first pass.
Memory that no kernel wrote is filled with the largest numbers: one that was used as an index would end the program.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from radixmesh.daemons.worker.cuda import kernel_choice, load
from radixmesh.daemons.worker.cuda.compilers import client
from radixmesh.daemons.worker.cuda.compilers.client import KernelCompilers
from radixmesh.daemons.worker.cuda.model.layer_kinds import each_kind
from radixmesh.daemons.worker.cuda.step.warm_up import compile_ahead
from support.device_settings import TINY_SETTINGS
from support.replaying_device import ReplayingDevice


def main() -> None:
    launchers: list[str] = []
    triton.runtime.driver.set_active(
        SimpleNamespace(
            launcher_cls=lambda source, metadata: launchers.append(threading.current_thread().name),
            utils=SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": 232_448},
                load_binary=lambda *binary: (object(), object(), 0, 0, 1024),
            ),
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    client._TIMEOUT_S = 500.0  # A start gives up sooner; here all of them are to be seen, on a busy machine too.
    kernel_choice.kernels_name = lambda settings, device: settings.kernels
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    settings = load.replace(
        TINY_SETTINGS,
        dtype="bfloat16",
        attention_backend="triton",
        cuda_graphs=True,
        use_pdl=True,
        max_total_len=512,
        num_pages=1024,
        max_tokens_per_step=512,
        num_slots=16,
    )
    runner = load.load_device_runner(Path(sys.argv[1]), settings, ReplayingDevice())
    # A start asks for the kernels of random weights, before it reads those of the folder.
    of_shapes = load.replace(settings, load_format="dummy", num_pages=64)
    told = []
    for other in (load.load_device_runner(Path(sys.argv[1]), of_shapes, ReplayingDevice()), runner):
        with client.asked_kernels() as kernels:
            other.launch_all()
        told.append(sorted((kernel["name"], kernel["specialization"]) for kernel in kernels))
    assert told[0] == told[1], "random weights have other kernels"
    assert told[0] == _of_all_layers(Path(sys.argv[1]), of_shapes), "layers that are alike have other kernels"
    compilers = KernelCompilers(2, Path(knobs.cache.dir) / "note")
    compilers.ask(runner.launch_all)
    compilers.wait()
    from_cache: list[bool] = []
    knobs.compilation.listener = lambda **compiled: from_cache.append(compiled["cache_hit"])
    found = []
    for _ in range(2):
        with compile_ahead.compiling_ahead() as kernels:
            runner.launch_all()
        assert all(kernel.exception() is None for kernel in kernels), kernels
        found.append(len(kernels))
    assert compile_ahead.can_compile_ahead()
    assert all(name.startswith("compile") for name in launchers), launchers
    print(json.dumps([*found, len(launchers), compilers.num_kernels, sum(from_cache)]))


def _of_all_layers(folder: Path, settings: load.DeviceSettings) -> list[tuple[str, str]]:
    """Kernels of the same shapes in more layers, of which none is left out."""
    with tempfile.TemporaryDirectory() as name:
        config = json.loads((folder / "config.json").read_text())
        (Path(name) / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
        runner = load.load_device_runner(Path(name), settings, ReplayingDevice())
    assert len(each_kind(runner.model.parts)) < len(runner.model.parts)
    runner.model.each_kind_once = nullcontext
    with client.asked_kernels() as kernels:
        runner.launch_all()
    return sorted((kernel["name"], kernel["specialization"]) for kernel in kernels)


if __name__ == "__main__":
    main()
