"""The default configurations of attention, compiled for the GPU: what they hold of an SM is what they count on."""

import json
import os
import subprocess
import sys

import pytest

_SM_REGISTERS = 65536
_SM_SHARED, _PROGRAM_SHARED, _RESERVED = 228 << 10, 227 << 10, 1 << 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("head_dim, heads", [(128, 24), pytest.param(64, 32, marks=pytest.mark.full)])
def test_default_configurations_fit(head_dim, heads):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "support.compiled_kernels", str(head_dim), str(heads)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    launches = json.loads(run.stdout)
    split = [launch for launch in launches if launch["kernel"] == "_split_attention_kernel"]
    extend = [launch for launch in launches if launch["kernel"] == "_extend_kernel"]
    assert len(split) == 3 and len(extend) == 3
    for launch, resident in [*zip(split, (4, 2, 4), strict=True), *((launch, 1) for launch in extend)]:
        assert launch["shared"] <= _PROGRAM_SHARED
        assert resident * (launch["shared"] + _RESERVED) <= _SM_SHARED, launch
        assert resident * launch["registers"] * 32 * launch["warps"] <= _SM_REGISTERS, launch
        # A few registers are spilled around a loop, none in it.
        assert launch["stack"] <= 128, launch
