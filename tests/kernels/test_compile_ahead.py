"""Kernels of a warm-up, compiled ahead of it for an H200 that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
def test_a_second_pass_finds_all_kernels_ready_and_none_was_run(model, tmp_path):
    """Memory that kernels were to write holds the largest numbers meanwhile: nothing takes places from it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "support.ahead_of_warm_up", str(ROOT / "compose" / "models" / model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, num_ready, num_asked, num_from_cache = json.loads(done.stdout.splitlines()[-1])
    assert num_ready == first > 20 and second == 0
    # Another process had compiled them all, under the keys that this one looks for.
    assert num_asked == num_from_cache == first
