"""Structured logs: one line of JSON an event on stderr, with the request id that the task works for."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import IO

# A context variable is per task, not global state: each handler sees its own.
_request_id: ContextVar[str] = ContextVar("radixmesh_request_id", default="")
_FIELDS = "radixmesh_fields"


class MeshLogger:
    """A logger of events with fields. An event is a fixed snake_case name; everything that varies is a field."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Logs an error with the traceback of the exception being handled."""
        self._log(logging.ERROR, event, fields, with_traceback=True)

    def _log(self, level: int, event: str, fields: dict[str, object], *, with_traceback: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, extra={_FIELDS: fields}, exc_info=with_traceback)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; records of other libraries become events too."""

    def __init__(self, *, daemon: str, instance: str) -> None:
        super().__init__()
        self._daemon = daemon
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "daemon": self._daemon,
            "instance": self._instance,
            "logger": record.name,
            "event": record.getMessage(),
        }
        request_id = _request_id.get()
        if request_id:
            line["request_id"] = request_id
        fields = getattr(record, _FIELDS, {})
        # A field never hides who speaks, when and of what.
        line.update((f"{key}_" if key in line else key, value) for key, value in fields.items())
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def get_logger(name: str) -> MeshLogger:
    """The logger of a module."""
    return MeshLogger(logging.getLogger(name))


@contextmanager
def bind_request(request_id: str) -> Iterator[None]:
    """Everything logged in this block, and by tasks started in it, carries the request id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def set_request(request_id: str) -> None:
    """Binds the request id for the rest of the current task."""
    _request_id.set(request_id)


def current_request() -> str:
    """The bound request id, empty if none."""
    return _request_id.get()


def configure_logging(level: str, daemon: str, instance: str, stream: IO[str] | None = None) -> None:
    """Sends all logs of this process to stderr (or stream) as JSON lines. Replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(daemon=daemon, instance=instance))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    if stream is None:
        sys.excepthook = _log_uncaught
        sys.unraisablehook = _log_unraisable


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Logs what would be a traceback on stderr. grpc reports calls cut off by the server's stop this way too."""
    level = logging.DEBUG if issubclass(kind, asyncio.CancelledError) else logging.ERROR
    logging.getLogger(__name__).log(level, "uncaught_exception", exc_info=(kind, error, trace))


def _log_unraisable(caught: sys.UnraisableHookArgs) -> None:
    """As _log_uncaught, for what was raised where nobody can catch it: destructors, callbacks of C code."""
    error = caught.exc_value or caught.exc_type()
    level = logging.DEBUG if isinstance(error, asyncio.CancelledError) else logging.ERROR
    fields = {_FIELDS: {"raised_in": repr(caught.object)}}
    trace = (caught.exc_type, error, caught.exc_traceback)
    logging.getLogger(__name__).log(level, "unraisable_exception", extra=fields, exc_info=trace)
