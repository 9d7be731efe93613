"""Turns the daemons' structured log lines into ones for people."""

import json

# Known from the prefix, or of use only to programs.
_LEFT_OUT = frozenset({"ts", "level", "daemon", "instance", "logger", "event"})


def readable(line: str) -> str:
    """Returns `warning event_name key=value ...` for a structured line, and any other line as it is.

    The level is left out where it is info; the traceback of an error follows on lines of its own.
    """
    if not line.startswith("{"):
        return line
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    level = str(record.get("level", ""))
    traceback = record.pop("traceback", None)
    fields = [f"{key}={_value(value)}" for key, value in record.items() if key not in _LEFT_OUT and value is not None]
    words = [*([] if level == "info" else [level]), str(record["event"]), *fields]
    return " ".join(words) + (f"\n{traceback}" if traceback else "")


def _value(value: object) -> str:
    if isinstance(value, str):
        return value if value and " " not in value else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return ",".join(_value(item) for item in value)
    return json.dumps(value, ensure_ascii=False)
