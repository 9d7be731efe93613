"""What is kept of a step that died: its plan and the traceback, to be run again by whoever looks into it."""

from __future__ import annotations

import traceback
from pathlib import Path

from radixmesh.worker.v1 import worker_pb2


class PlanDump:
    """Writes plans of died steps into a folder, which keeps the last `max_dumps`: a crash loop must not fill a disk."""

    def __init__(self, folder: Path, instance_id: str, max_dumps: int = 16) -> None:
        self._folder = folder
        self._instance_id = instance_id
        self._max_dumps = max_dumps

    def write(self, plan: worker_pb2.StepPlan, error: BaseException) -> str:
        """Path of the written plan (bytes of a StepPlan; the traceback lies beside it as .txt), "" if it was not."""
        name = f"plan-{self._instance_id[:8]}-{plan.header.epoch}-{plan.header.step_id}"
        path = self._folder / f"{name}.bin"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(plan.SerializeToString())
            path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))
            self._forget_old()
        except OSError:
            return ""  # A full disk must not hide why the step died.
        return str(path)

    def _forget_old(self) -> None:
        dumps = sorted(self._folder.glob("plan-*.bin"), key=lambda path: path.stat().st_mtime)
        for old in dumps[: -self._max_dumps]:
            old.unlink(missing_ok=True)
            old.with_suffix(".txt").unlink(missing_ok=True)
