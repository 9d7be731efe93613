"""The functions that bench/span_recorder.py times: each is where it says, whatever was moved or renamed."""

import importlib

import pytest
from support.bench_modules import bench_imports

with bench_imports():
    from span_recorder import CUDA_TARGETS, STEP_TARGETS


@pytest.mark.parametrize(
    ("module", "path"), [*(of for targets in STEP_TARGETS.values() for of in targets), *CUDA_TARGETS]
)
def test_a_function_that_is_timed_is_there(module: str, path: str) -> None:
    pytest.importorskip("triton", reason="modules of the GPU worker import it")
    owner: object = importlib.import_module(module)
    for name in path.split("."):
        owner = getattr(owner, name)
    assert callable(owner)
