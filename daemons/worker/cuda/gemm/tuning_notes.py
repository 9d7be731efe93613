"""Choices of GEMMs that earlier starts on such a device have measured: a worker that comes back need not measure again.

A choice is the name of a candidate. Stale notes cost speed alone: whoever takes one checks what the candidate computes,
and a name that no candidate has is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.gemm.backend import GemmProblem

_log = get_logger(__name__)

BASELINE = "baseline"
"""No candidate was faster."""
_MAX_FILE_BYTES = 4 << 20
_MAX_NAME = 256
# Sources that decide on choices, beside the device and its libraries.
_SOURCES = ("daemons/worker/cuda/gemm", "daemons/worker/cuda/fp8", "kernels/gemm_sm90", "kernels/fp8")
_PACKAGES = ("torch", "triton", "nvidia-cublas", "nvidia-cublas-cu12")


class KindNotes:
    """Of one kind of kernels."""

    def __init__(self, choices: Mapping[str, str]) -> None:
        self._choices = dict(choices)

    def get(self, problem: GemmProblem) -> str | None:
        """The candidate's name; None: not measured yet."""
        return self._choices.get(str(problem))

    def put(self, problem: GemmProblem, candidate: object | None) -> None:
        self._choices[str(problem)] = BASELINE if candidate is None else str(candidate)

    @property
    def choices(self) -> Mapping[str, str]:
        return self._choices


class TuningNotes:
    """One file for one kind of device. Several processes may keep it at once: the last one's stays, whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kinds: dict[str, KindNotes] = {}
        self._kept = _read(path)

    @classmethod
    def of_device(cls, device: torch.device) -> TuningNotes:
        """Beside the kernels that are kept. Another device, driver, library or source has other notes."""
        facts = torch.cuda.get_device_properties(device)
        named = [facts.name, facts.multi_processor_count, facts.total_memory, _driver(), *map(_version, _PACKAGES)]
        hashed = hashlib.sha256(repr(named).encode())
        root = Path(__file__).parents[4]
        for folder in _SOURCES:
            for path in sorted((root / folder).rglob("*")):
                if path.is_file() and path.suffix != ".pyc":
                    hashed.update(path.read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(cache / "radixmesh" / "kernels" / f"gemm-{hashed.hexdigest()[:32]}.json")

    def kind(self, name: str) -> KindNotes:
        return self._kinds.setdefault(name, KindNotes(self._kept.get(name, {})))

    def keep(self) -> None:
        """Writes them for the next start. What fails is logged: that start measures again."""
        kinds = {**self._kept, **{name: dict(kind.choices) for name, kind in self._kinds.items()}}
        if kinds == self._kept:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(kinds, file)
                os.replace(name, self._path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.warning("gemm_choices_not_kept", reason=str(error))


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Nothing where nothing whole is there."""
    with suppress(OSError, ValueError):
        if path.stat().st_size <= _MAX_FILE_BYTES:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and all(_is_choices(choices) for choices in found.values()):
                return found
    return {}


def _is_choices(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(name, str) and len(name) <= _MAX_NAME for name in found.values())


def _driver() -> str:
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace").splitlines()[0]
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def unknown(notes: KindNotes | None, problems: Sequence[GemmProblem]) -> list[GemmProblem]:
    """Those that have to be measured."""
    return [problem for problem in problems if notes is None or notes.get(problem) is None]
