"""Dump of a step that died: its plan and the traceback, to be run again by whoever looks into it."""

from __future__ import annotations

import traceback
from pathlib import Path

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.plans.files.private_folder import PrivateFolder
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

_PREFIX = "plan-"
# Of the plans of all workers that share the folder. A container's /tmp, where they may land, has 64 MiB.
_MAX_BYTES = 32 << 20
_MAX_TEXT_BYTES = 64 << 10


class PlanDump:
    """Writes plans of died steps into a private folder, which keeps the last ones: a crash loop must not fill a disk.

    folder None: see PrivateFolder. A plan holds users' prompts as token ids.
    """

    def __init__(self, folder: Path | None, instance_id: str, max_dumps: int = 16, max_bytes: int = _MAX_BYTES) -> None:
        self._folder = PrivateFolder(folder)
        self._instance_id = instance_id
        self._max_files = 2 * max_dumps
        self._max_bytes = max_bytes
        if folder is not None and folder.exists():
            try:
                self._folder.open()
            except OSError as error:  # Said while there is time to cure it: the step that dies is not repeated.
                log.warning("dump_folder_refused", error=str(error))

    def write(self, plan: worker_pb2.StepPlan, error: BaseException) -> str:
        """Path of the written plan (bytes of a StepPlan; the traceback lies beside it as .txt), "" if it was not."""
        name = f"{_PREFIX}{self._instance_id[:8]}-{plan.header.epoch}-{plan.header.step_id}"
        try:
            data = plan.SerializeToString()
            text = "".join(traceback.format_exception(error)).encode("utf-8", "replace")[-_MAX_TEXT_BYTES:]
            if len(data) + len(text) > self._max_bytes:
                raise OSError(f"a plan of {len(data)} bytes is more than the {self._max_bytes} that are kept of all")
            left = self._max_bytes - len(data) - len(text)
            self._folder.make_room(_PREFIX, max_files=self._max_files - 2, max_bytes=left)
            self._folder.write(f"{name}.txt", text)
            return str(self._folder.write(f"{name}.bin", data))
        except OSError as reason:
            # A full disk, or a folder that others can read, must not hide why the step died.
            log.warning("plan_not_dumped", error=str(reason))
            return ""
