"""Kernels that begin before those ahead of them have ended read nothing by then that a kernel of the step writes."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Weights, angles, options of slots, and the step's numbers as the host sent them.
_MAY_BE_READ = {
    # They begin when all ahead of them is over.
    "_fetch_step_inputs_kernel": None,
    "_scatter_embed_kernel": None,
    "_rope_kv_kernel": [
        "bias_ptr",
        "cos_ptr",
        "k_norm_ptr",
        "positions_ptr",
        "q_norm_ptr",
        "row_slots_ptr",
        "sin_ptr",
    ],
    "_rms_norm_kernel": ["w_ptr"],
    "_silu_mul_kernel": ["bias_ptr"],
    "_gemv_kernel": ["norm_ptr", "w_ptr"],
    "_fp8_gemv_kernel": ["norm_ptr", "scales_ptr", "w_ptr"],
    "_fp8_linear_kernel": [],
    "_quantize_rows_kernel": ["bias_ptr", "norm_ptr"],
    "_silu_quantize_kernel": ["bias_ptr"],
    "_highest_kernel": [],
    "_gumbel_kernel": ["row_slots_ptr", "temperature_ptr"],
    "_finish_kernel": ["ring_index_ptr", "row_slots_ptr", "temperature_ptr"],
}


def test_what_is_read_ahead_of_the_wait_is_written_by_no_kernel_of_the_step():
    # Kernels are made for the interpreter or for a GPU as their modules are imported.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "support.early_loads"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == _MAY_BE_READ
