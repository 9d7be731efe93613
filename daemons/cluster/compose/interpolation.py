"""Compose's variables: `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME-default}`, `${NAME:?message}`, `$$`.

A default may hold variables itself, which hold none.
"""

import re
from collections.abc import Mapping

from radixmesh.daemons.cluster.errors import ComposeError

_VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<bare>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<op>:?[-?])(?P<rest>(?:[^{}]|\$\{[^{}]*\})*))?\})"
)


def interpolate(tree: object, variables: Mapping[str, str], where: str = "") -> object:
    """Returns a copy of a parsed YAML tree with the variables in its string values replaced; keys are left alone.

    An unset variable without a default is an error here, where Docker would warn and put nothing: an empty address
    or path is never what was meant.
    """
    if isinstance(tree, str):
        return _interpolate_text(tree, variables, where)
    if isinstance(tree, dict):
        return {key: interpolate(value, variables, f"{where}.{key}".lstrip(".")) for key, value in tree.items()}
    if isinstance(tree, list):
        return [interpolate(value, variables, f"{where}[{index}]") for index, value in enumerate(tree)]
    return tree


def _interpolate_text(text: str, variables: Mapping[str, str], where: str) -> str:
    if "$" in _VARIABLE.sub("", text):
        raise ComposeError(where, f"{text!r} holds a '$' that starts no variable; write '$$' for a plain dollar sign")

    def replace(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        name = match["bare"] or match["name"]
        operator, rest = match["op"] or "", match["rest"] or ""
        value = variables.get(name)
        if value is not None and (value or not operator.startswith(":")):
            return value
        if operator.endswith("-"):
            return _interpolate_text(rest, variables, where)
        raise ComposeError(where, rest or f"the variable {name} is not set; set it or write ${{{name}:-default}}")

    return _VARIABLE.sub(replace, text)
