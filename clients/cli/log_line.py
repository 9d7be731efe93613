"""Turns the daemons' structured log lines into ones for people."""

import json

from radixmesh.daemons.runtime.telemetry.printable import escape_controls

# Known from the prefix, or of use only to programs.
_LEFT_OUT = frozenset({"ts", "level", "daemon", "instance", "logger", "event"})


def readable(line: str) -> str:
    """Returns `warning event_name key=value ...` for a structured line, and any other line as it is, escaped.

    The level is left out where it is info; the traceback of an error follows on lines of its own.
    """
    if not line.startswith("{"):
        return escape_controls(line)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return escape_controls(line)
    if not isinstance(record, dict) or "event" not in record:
        return escape_controls(line)
    level = str(record.get("level", ""))
    traceback = record.pop("traceback", None)
    fields = [
        f"{key if key.isidentifier() else json.dumps(key)}={_value(value)}"
        for key, value in record.items()
        if key not in _LEFT_OUT and value is not None
    ]
    words = [*([] if level in ("info", "") else [level]), str(record["event"]), *fields]
    return escape_controls(" ".join(words), is_line=True) + (
        f"\n{escape_controls(str(traceback))}" if traceback else ""
    )


def _value(value: object) -> str:
    if isinstance(value, str):
        # A value that could pass for several, or for its own escaped form, is quoted.
        is_plain = value.isprintable() and not any(char in value for char in ' ="\\')
        return value if value and is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return ",".join(_value(item) for item in value)
    return json.dumps(value, ensure_ascii=False)
