"""Profiler traces of steps. Runs on the step thread."""

from __future__ import annotations

import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.plans.files.private_folder import PrivateFolder
from radixmesh.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from torch.profiler import profile

_log = get_logger(__name__)


# Of one trace at most: while a trace is written no step runs, and a worker that is silent for 5 s counts as dead. Steps
# of a GPU are some 300 kernels each, of 11 us to write; those of a CPU are more operations, of 50 us.
_MOST_STEPS_GPU, _MOST_STEPS_CPU = 400, 100

_PREFIX = "steps-"
# Kept in the folder, in number and bytes: whoever asks for traces must not fill a disk.
_MAX_TRACES, _MAX_TRACE_BYTES = 8, 1 << 30


class StepProfiler(ABC):
    """One trace at a time."""

    @abstractmethod
    def start(self, num_steps: int) -> None:
        """Starts a trace of `num_steps` (0: until stopped, or until it has as many as it may have).

        Raises INVALID_ARGUMENT if one runs, if it may not have so many, or if it could not be written.
        """

    @abstractmethod
    def stop(self) -> str:
        """Ends the trace and writes it, if its steps have not done so; its path. Raises INVALID_ARGUMENT if there is
        none, or if it could not be written."""

    def act(self, action: worker_pb2.ProfileAction, num_steps: int) -> str:
        """Starts a trace, or stops it and returns its path. Raises MISSING_FIELD for neither."""
        if action == worker_pb2.PROFILE_ACTION_START:
            self.start(num_steps)
            return ""
        if action == worker_pb2.PROFILE_ACTION_STOP:
            return self.stop()
        message = "action is unspecified: send START or STOP"
        raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "action"})

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
    """Chrome traces by torch.profiler, for runners that loaded torch. `folder`: where they are written, as
    steps-NAME-1.json and so on, the last ones kept; None: see PrivateFolder."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder = PrivateFolder(folder)
        self._path = Path()
        """The folder, once it was found to be usable."""
        self._name = name
        self.running: profile | None = None
        self.steps_left = 0
        self._num_traces = 0
        # Answer of stop() for a trace that ended by itself.
        self._ended: str | MeshError | None = None

    def start(self, num_steps: int) -> None:
        if self.running is not None:
            raise _invalid("action", "a trace runs: stop it first")
        import torch
        from torch.profiler import ProfilerActivity, profile

        # On a GPU its kernels alone: recording every operation of the host would hold up the thread that launches.
        has_gpu = torch.cuda.is_available()
        most = _MOST_STEPS_GPU if has_gpu else _MOST_STEPS_CPU
        if num_steps > most:
            raise _invalid("num_steps", f"a trace of {num_steps} steps is too long: at most {most} fit", most)
        self._check_folder()
        starting = profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU])
        starting.start()
        self.running, self._ended, self.steps_left = starting, None, num_steps or most

    def stop(self) -> str:
        if self.running is not None:
            self._end()
        ended, self._ended = self._ended, None
        if ended is None:
            raise _invalid("action", "no trace runs: start one first")
        if isinstance(ended, MeshError):
            raise ended
        return ended

    def on_step(self) -> None:
        if self.running is None:
            return
        self.steps_left -= 1
        if self.steps_left == 0:
            self._end()

    def _end(self) -> None:
        """Steps go on whether or not the trace can be written."""
        running, self.running = self.running, None
        assert running is not None
        self._num_traces += 1
        path = self._path / f"{_PREFIX}{self._name}-{self._num_traces}.json"
        try:
            running.stop()
            running.export_chrome_trace(str(path))
            # The library reports a file that it cannot write on stderr alone.
            if not path.is_file() or not path.stat().st_size:
                raise OSError("nothing was written")
        except (OSError, RuntimeError) as error:
            _log.warning("trace_not_written", path=str(path), error=repr(error))
            self._ended = _unwritten(error, path)
        else:
            self._ended = str(path)

    def _check_folder(self) -> None:
        try:
            self._path = self._folder.open()
            self._folder.make_room(_PREFIX, max_files=_MAX_TRACES - 1, max_bytes=_MAX_TRACE_BYTES)
            with tempfile.TemporaryFile(dir=self._path):
                pass
        except OSError as error:
            raise _unwritten(error) from error


def make_profiler(folder: Path | None, name: str) -> StepProfiler:
    """A torch profiler if the runner brought torch in, else none: torch is never imported for it alone."""
    return TorchProfiler(folder, name) if "torch" in sys.modules else NoProfiler()


def _unsupported() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, "this backend has no profiler", {"feature": "profile"})


def _unwritten(error: Exception, path: Path | None = None) -> MeshError:
    where = f" to {path}" if path is not None else ""
    return _invalid("dump_folder", f"no trace can be written{where} ({error}): choose another --dump-folder")


def _invalid(field: str, message: str, most: int | None = None) -> MeshError:
    metadata = {"field": field} if most is None else {"field": field, "max": str(most)}
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, metadata)
