"""Profiler traces of steps. Runs on the step thread."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.logs import get_logger

if TYPE_CHECKING:
    from torch.profiler import profile

_log = get_logger(__name__)


class StepProfiler(ABC):
    """One trace at a time."""

    @abstractmethod
    def start(self, num_steps: int) -> None:
        """Starts a trace of `num_steps` (0: until stopped). Raises INVALID_ARGUMENT if one runs."""

    @abstractmethod
    def stop(self) -> str:
        """Ends the trace and writes it; its path. Raises INVALID_ARGUMENT if none runs."""

    @abstractmethod
    def on_step(self) -> None:
        """A step has run."""


class NoProfiler(StepProfiler):
    """For backends with nothing to profile: everything is UNSUPPORTED."""

    def start(self, num_steps: int) -> None:
        raise _unsupported()

    def stop(self) -> str:
        raise _unsupported()

    def on_step(self) -> None:
        return


class TorchProfiler(StepProfiler):
    """Chrome traces by torch.profiler, for runners that loaded torch. `folder`: where they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile: profile | None = None
        self._steps_left = 0
        self._num_traces = 0
        self._last_path = ""

    def start(self, num_steps: int) -> None:
        if self._profile is not None:
            raise _invalid("a trace runs: stop it first")
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._last_path = ""
        # On a GPU its kernels alone: recording every operation of the host would hold up the thread that launches.
        has_gpu = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU])
        self._profile.start()
        # 0 counts down past zero: never reached.
        self._steps_left = num_steps

    def stop(self) -> str:
        if self._profile is None:
            if self._last_path:
                # It ended by itself after its steps.
                path, self._last_path = self._last_path, ""
                return path
            raise _invalid("no trace runs: start one first")
        return self._finish()

    def on_step(self) -> None:
        if self._profile is None:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            try:
                self._last_path = self._finish()
            except (OSError, RuntimeError) as error:
                # Steps go on without a trace: stop() says that none runs.
                _log.warning("trace_not_written", folder=str(self._folder), error=repr(error))

    def _finish(self) -> str:
        running, self._profile = self._profile, None
        assert running is not None
        running.stop()
        self._num_traces += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = str(self._folder / f"steps-{self._num_traces}.json")
        running.export_chrome_trace(path)
        return path


def make_profiler(folder: Path) -> StepProfiler:
    """A torch profiler if the runner brought torch in, else none: torch is never imported for it alone."""
    return TorchProfiler(folder) if "torch" in sys.modules else NoProfiler()


def _unsupported() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, "this backend has no profiler", {"feature": "profile"})


def _invalid(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "action"})
