"""Faults of the device in a step: the plan is kept, the step fails, those behind it do not run, the process ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixmesh.worker.v1 import worker_pb2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("fault", "said"), [("illegal_access", "illegal memory access"), ("out_of_memory", "out of memory")]
)
def test_a_fault_of_the_device_ends_the_step_and_the_process(fault: str, said: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "support.device_fault", fault, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    # Nothing of the broken context keeps it, or ends it otherwise.
    assert run.returncode == 1, run.stderr[-3000:]
    answers = json.loads(run.stdout.splitlines()[-1])
    assert [answer["kind"] for answer in answers] == ["result", "result", "died", "none", "none"], answers
    assert answers[2]["reason"] == "STEP_FAILED" and said in answers[2]["error"].lower()
    (dump,) = tmp_path.glob("*.bin")
    assert worker_pb2.StepPlan.FromString(dump.read_bytes()).header.step_id == 3
    assert said in dump.with_suffix(".txt").read_text().lower()
