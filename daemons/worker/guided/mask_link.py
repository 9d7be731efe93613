"""One process that fills masks, as the worker sees it: its start, and frames both ways that hold up no thread."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from radixmesh.daemons.worker.guided.mask_frames import MAX_REPORT_BYTES, FrameReader, Kind, frame

_MODULE = "radixmesh.daemons.worker.guided.mask_process"
_BUFFER_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MOST_AT_ONCE = 1 << 16
"""Bytes that send() tries to send itself: an artefact has megabytes, and the step thread sends it to each process."""


class MaskLink:
    """Starts the process, which takes seconds until it is READY; nothing but memory() is sent before. send() and
    flush() are called with one lock held. wake: called by send() when flush() is needed. Raises OSError."""

    def __init__(self, folder: Path, backend: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._backlog: deque[memoryview] = deque()
        self._reader = FrameReader(MAX_REPORT_BYTES)
        self.started_s = self.heard_s = time.monotonic()
        with theirs:
            try:
                for end in (self.socket, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                self._process = subprocess.Popen(
                    # -P: the daemon's folder is no place to import from.
                    [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), str(folder), backend],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # The library prints warnings there.
                    # Its only threads are its own, and it has no use for a device.
                    env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                )
            except OSError:
                self.socket.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory(self, descriptor: int, shape: Mapping[str, int]) -> None:
        """The first frame: the masks' memory. Raises OSError."""
        socket.send_fds(self.socket, [frame(Kind.MEMORY, json.dumps(dict(shape)).encode())], [descriptor])

    def send(self, data: bytes) -> None:
        """Never waits: what is large, or the process does not take yet, is kept for flush(). Of a process that has
        ended nothing is said here; read() tells."""
        if self._backlog:
            self._backlog.append(memoryview(data))
            return
        left = memoryview(data)
        if len(data) <= _MOST_AT_ONCE:
            left = self._try(left)
        if left:
            self._backlog.append(left)
            self._wake()

    def flush(self) -> None:
        """Sends more of what was kept."""
        while self._backlog:
            left = self._try(self._backlog.popleft())
            if left:
                self._backlog.appendleft(left)
                return

    @property
    def num_kept_bytes(self) -> int:
        """That flush() has to send."""
        return sum(map(len, tuple(self._backlog)))

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Frames that have come. Raises EOFError behind the last one, ValueError for what is no frame."""
        while True:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self.heard_s = time.monotonic()
            yield from self._reader.read(data)

    def end(self) -> None:
        """Kills the process and waits until it is gone: it writes to no memory any more."""
        self._process.kill()
        self._process.wait()
        self.socket.close()

    def _try(self, data: memoryview) -> memoryview:
        try:
            return data[self.socket.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            return data[:0]
