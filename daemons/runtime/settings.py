"""Settings of a daemon: one frozen dataclass, filled from flags and RADIXMESH_* variables; a flag wins.

Field `decode_depth: int` is the flag `--decode-depth` and the variable `RADIXMESH_DECODE_DEPTH`. Types: int, float,
bool (`--x` / `--no-x`; variables true/false/1/0/yes/no/on/off), str, Path, enums of str, tuples of str
(comma-separated), and each of these or None (the text "none", or an empty variable).

A renamed setting keeps its old flag and variable for one release: `setting(..., deprecated=("old-flag",))` accepts
`--old-flag` and `RADIXMESH_OLD_FLAG`, leaves them out of --help, and logs one warning per use that names the new one.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from radixmesh.daemons.runtime.telemetry.logs import configure_logging, get_logger

log = get_logger(__name__)

PREFIX = "RADIXMESH_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

_T = TypeVar("_T")
_Parser = Callable[[str], object]


def setting(default: _T, help_text: str, *, deprecated: tuple[str, ...] = ()) -> _T:
    """A dataclass field with a default and the help that its flag shows.

    deprecated: earlier names of the flag, without the leading dashes.
    """
    return dataclasses.field(default=default, metadata={"help": help_text, "deprecated": deprecated})


def required(help_text: str, *, deprecated: tuple[str, ...] = ()) -> Mapping[str, object]:
    """Metadata-only twin of setting(): `model: Path = field(metadata=required("folder of the model"))`."""
    return {"help": help_text, "deprecated": deprecated}


def load_settings(
    settings_class: type[_T], argv: Sequence[str] | None, prog: str, environ: Mapping[str, str] | None = None
) -> _T:
    """Fills settings_class from argv (None: the process's own) and the environment (None: the process's own).

    Leaves the process with status 2 and a message that names flag and variable when a value is missing or wrong, or
    when the class's __post_init__ raises ValueError. RADIXMESH_ variables that fit no field are ignored with a warning.
    A new name wins over a deprecated one, and any flag over any variable.
    """
    environ = os.environ if environ is None else environ
    fields = _fields_of(settings_class)
    parser = argparse.ArgumentParser(
        prog=prog, description=(settings_class.__doc__ or "").strip() or None, allow_abbrev=False
    )
    for field in fields:
        field.add_to(parser)
    flags = vars(parser.parse_args(argv))
    _show_warnings_of(prog)
    values: dict[str, object] = {}
    for field in fields:
        field.warn_of_deprecated(flags, environ)
        try:
            value = field.value_from(flags, environ)
        except ValueError as error:
            parser.error(str(error))
        if value is not MISSING:
            values[field.name] = value
    _warn_of_unknown(environ, {name.variable for field in fields for name in field.names})
    try:
        return settings_class(**values)
    except ValueError as error:
        parser.error(str(error))


class _Name(NamedTuple):
    """One spelling of a setting, with underscores: also its key among the parsed flags."""

    name: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    kind: object
    is_optional: bool
    default: object
    help_text: str
    names: tuple[_Name, ...]
    """The name of now first, then the deprecated ones."""

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        default = "required" if self.default is MISSING else f"default {_shown(self.default)}"
        text = f"{self.help_text} [{default}; {self.names[0].variable}]".strip().replace("%", "%%")
        for name in self.names:
            shown = text if name is self.names[0] else argparse.SUPPRESS
            if self.kind is bool:
                parser.add_argument(
                    name.flag, dest=name.name, default=None, action=argparse.BooleanOptionalAction, help=shown
                )
            else:
                parser.add_argument(name.flag, dest=name.name, default=None, metavar=_metavar(self.kind), help=shown)

    def value_from(self, flags: Mapping[str, object], environ: Mapping[str, str]) -> object:
        """The value, or MISSING if the dataclass's default applies. Raises ValueError naming flag and variable."""
        for name in self.names:
            if flags[name.name] is not None:
                return self._parsed(flags[name.name], name.flag, name.variable)
        for name in self.names:
            if name.variable in environ:
                return self._parsed(environ[name.variable], name.variable, name.flag)
        if self.default is MISSING:
            flag, variable = self.names[0].flag, self.names[0].variable
            raise ValueError(f"{flag} (or {variable}) is required: {self.help_text}".rstrip(": "))
        return MISSING

    def warn_of_deprecated(self, flags: Mapping[str, object], environ: Mapping[str, str]) -> None:
        """Logs each deprecated name in use, with the one to write instead."""
        current, *deprecated = self.names
        for name in deprecated:
            if flags[name.name] is not None:
                log.warning("deprecated_setting", deprecated=name.flag, use=current.flag)
            if name.variable in environ:
                log.warning("deprecated_setting", deprecated=name.variable, use=current.variable)

    def _parsed(self, text: object, source: str, other: str) -> object:
        if isinstance(text, bool):
            return text
        assert isinstance(text, str)
        if self.is_optional and text.strip().lower() in ("", "none"):
            return None
        try:
            return _parser_of(self.kind)(text)
        except ValueError as error:
            raise ValueError(f"{source} (also {other}): {text!r} is no {_metavar(self.kind)}: {error}") from error


def _fields_of(settings_class: type[object]) -> list[_Field]:
    assert dataclasses.is_dataclass(settings_class), f"{settings_class} is no dataclass"
    hints = get_type_hints(settings_class)
    fields = []
    for field in dataclasses.fields(settings_class):
        if not field.init:
            continue
        kind, is_optional = _without_none(hints[field.name])
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        _parser_of(kind)  # A field of another type is a mistake of the class: it shows at once.
        deprecated = (old.replace("-", "_") for old in field.metadata.get("deprecated", ()))
        fields.append(
            _Field(
                name=field.name,
                kind=kind,
                is_optional=is_optional,
                default=default,
                help_text=str(field.metadata.get("help", "")),
                names=tuple(_Name(name) for name in (field.name, *deprecated)),
            )
        )
    return fields


def _without_none(kind: object) -> tuple[object, bool]:
    arguments = get_args(kind)
    if type(None) not in arguments:
        return kind, False
    rest = [argument for argument in arguments if argument is not type(None)]
    assert len(rest) == 1, f"a setting cannot be {kind}"
    return rest[0], True


def _parser_of(kind: object) -> _Parser:
    if get_origin(kind) is tuple and get_args(kind) == (str, ...):
        return _parse_tuple
    if kind is bool:
        return _parse_bool
    if kind in (int, float, str, Path):
        return cast(_Parser, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda text: _parse_enum(kind, text)
    raise TypeError(f"a setting cannot be {kind}")


def _parse_tuple(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"write one of {', '.join((*_TRUE, *_FALSE))}")


def _parse_enum(kind: type[Enum], text: str) -> Enum:
    try:
        return kind(text.strip().lower())
    except ValueError:
        raise ValueError(f"write one of {', '.join(str(member.value) for member in kind)}") from None


def _metavar(kind: object) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(str(member.value) for member in kind) + "}"
    if isinstance(kind, type) and get_origin(kind) is None:
        return kind.__name__.upper()
    return "A,B,..."


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default) or "none"
    if isinstance(default, Enum):
        return str(default.value)
    return "none" if default is None else str(default)


def _show_warnings_of(prog: str) -> None:
    """Warnings about settings come before the daemon configures its logs, and would lose their fields without this."""
    if not logging.getLogger().handlers:
        configure_logging("warning", prog.removeprefix("radixmesh-"), "", sys.stderr)


def _warn_of_unknown(environ: Mapping[str, str], known: set[str]) -> None:
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            log.warning("unknown_variable_ignored", variable=name)
