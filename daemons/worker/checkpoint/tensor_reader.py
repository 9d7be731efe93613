"""Reads the tensors of a folder one by one, whichever file each is in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from radixmesh.daemons.worker.checkpoint.config_reader import bad_checkpoint
from radixmesh.daemons.worker.checkpoint.load_progress import LoadProgress
from radixmesh.daemons.worker.checkpoint.mxfp4 import numbers
from radixmesh.daemons.worker.checkpoint.tensor_index import TensorEntry
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice


class TensorReader:
    """A context: files stay open in it, so that tensors may be asked for in any order. num_bytes: read so far."""

    def __init__(self, entries: Mapping[str, TensorEntry], progress: LoadProgress | None = None) -> None:
        self.entries = entries
        self._progress = progress
        self.num_bytes = 0
        self._open: dict[Path, safe_open] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        """As it is stored, in the host's memory: the whole tensor, or a rank's share, of which no more is read.

        Raises MeshError BAD_CHECKPOINT naming file and tensor.
        """
        entry = self.entries[name]
        if not entry.parts:
            return self._read(name, entry.file, cut)
        # Experts come first in blocks and scales too.
        of_parts = cut if cut is not None and cut.dim == 0 else None
        blocks, scales = (self._read(part, its_entry.file, of_parts) for part, its_entry in entry.parts)
        whole = numbers(blocks, scales)
        return whole if cut is None or cut.dim == 0 else cut.take(whole.__getitem__)

    def _read(self, name: str, file: Path, cut: TensorSlice | None) -> torch.Tensor:
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            opened = self._open[file]
            if cut is None:
                tensor: torch.Tensor = opened.get_tensor(name)  # type: ignore[no-untyped-call]
            else:
                tensor = cut.take(opened.get_slice(name).__getitem__)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise bad_checkpoint(file, f"cannot be read at tensor {name!r} ({error}): copy it again", name) from error
        self.num_bytes += tensor.nbytes
        if self._progress is not None:
            self._progress.read(tensor.nbytes)
        return tensor
