"""A Jinja environment that counts: rendering ends with an error when it takes too long or makes too much text.

Templates come with a model and see what clients send, so that one with a quadratic loop, or one that doubles a text,
would let a chat take a tokenizer down. Counted are turns of loops, calls (macros among them), texts that operators,
filters and methods make, and what is put out. What would be made in one go is refused before it is made.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

from jinja2 import Environment, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TICKS_A_LOOK = 64
# Text that macros and blocks put out is put out again by who calls them.
_MAX_NESTED = 8
# Given to some filters before their arguments.
_PASSED = (Context, nodes.EvalContext, Environment)
_PADDED = ("ljust", "rjust", "center", "zfill", "expandtabs", "indent")
_GROWING_FILTERS = ("center", "indent", "join", "replace", "format", "wordwrap", "string", "pprint", "list", "batch")


class OverBudgetError(Exception):
    """The template makes more of this chat than is allowed."""


class RenderBudget:
    """max_chars: of the whole text, and of every text and list on the way. max_s: CPU seconds of the thread."""

    def __init__(self, max_chars: int, max_s: float) -> None:
        self.max_chars = max_chars
        self._max_s = max_s
        self._until_s = time.thread_time() + max_s
        self._num_ticks = self._num_put_out = 0

    def tick(self) -> None:
        self._num_ticks += 1
        if self._num_ticks % _TICKS_A_LOOK == 0 and time.thread_time() > self._until_s:
            raise OverBudgetError(f"it takes more than {self._max_s:g} s of CPU: send fewer or shorter messages")

    def put_out(self, num_chars: int) -> None:
        self.tick()
        self._num_put_out += num_chars
        if self._num_put_out > _MAX_NESTED * self.max_chars:
            raise self._too_much()

    def require(self, num_chars: int) -> None:
        """Room for a text or list of that length."""
        if num_chars > self.max_chars:
            raise self._too_much()

    def _too_much(self) -> OverBudgetError:
        return OverBudgetError(f"it makes a text of more than {self.max_chars} characters: send less")


class CountingEnvironment(ImmutableSandboxedEnvironment):
    """Counts for the thread's budget, see spending(); without one nothing is bounded. Thread-safe."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, extensions: Sequence[type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._finalized, optimized=False
        )
        self.code_generator_class = _CountingGenerator
        self._spent = threading.local()
        for name in _GROWING_FILTERS:
            self.filters[name] = self.counted_filter(name, self.filters[name])
        self.filters["_counted"] = self._counted

    @property
    def budget(self) -> RenderBudget | None:
        return cast("RenderBudget | None", getattr(self._spent, "budget", None))

    def spend(self, budget: RenderBudget | None) -> None:
        """Counts this thread's renderings against that budget from now on."""
        self._spent.budget = budget

    def counted_filter(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        """The filter, refused before it makes a text beyond the budget."""

        @functools.wraps(function)
        def counted(*args: object, **kwargs: object) -> object:
            self._require_call(name, [arg for arg in args if not isinstance(arg, _PASSED)], kwargs)
            return self._checked(function(*args, **kwargs))

        return counted

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        budget = self.budget
        if budget is not None:
            budget.tick()
            owner = getattr(obj, "__self__", None)
            if isinstance(owner, str):
                self._require_call(getattr(obj, "__name__", ""), [owner, *args], kwargs)
        return self._checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        budget = self.budget
        if budget is not None:
            budget.tick()
            if operator == "*":
                for text, times in ((left, right), (right, left)):
                    if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                        budget.require(len(text) * times)
            elif operator == "**" and isinstance(left, int) and isinstance(right, int):
                budget.require(max(0, right) * max(1, left.bit_length()))
            elif operator == "%" and isinstance(left, str):
                budget.require(_format_chars(left))
        return self._checked(super().call_binop(context, operator, left, right))

    def concat_counted(self, parts: Iterable[object]) -> str:
        """The texts of a ~ expression, joined."""
        texts = [str(part) for part in parts]
        if (budget := self.budget) is not None:
            budget.tick()
            budget.require(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self)
        return tree

    def _counted(self, items: Iterable[object]) -> Iterator[object]:
        budget = self.budget
        for item in items:
            if budget is not None:
                budget.tick()
            yield item

    # With a context, so that no expression is computed while compiling, where nothing counts.
    @pass_eval_context
    def _finalized(self, _: nodes.EvalContext, value: object) -> object:
        budget = self.budget
        if budget is not None:
            if not isinstance(value, str):
                value = str(value)
            budget.put_out(len(value))
        return value

    def _checked(self, value: object) -> object:
        if isinstance(value, (str, list, tuple)) and (budget := self.budget) is not None:
            budget.require(len(value))
        return value

    def _require_call(self, name: str, args: list[object], kwargs: Mapping[str, object]) -> None:
        budget = self.budget
        if budget is None or not args:
            return
        text, *rest = args
        numbers = [value for value in (*rest, *kwargs.values()) if isinstance(value, int)]
        texts = [value for value in (*rest, *kwargs.values()) if isinstance(value, str)]
        if name == "replace" and isinstance(text, str) and len(texts) >= 2:
            budget.require(len(text) + text.count(texts[0]) * len(texts[1]))
        elif name == "join" and isinstance(text, str) and rest and isinstance(rest[0], (list, tuple)):
            budget.require(len(text) * len(rest[0]) + sum(len(str(part)) for part in rest[0]))
        elif name == "join" and isinstance(text, (list, tuple)):
            glue = len(texts[0]) if texts else 0
            budget.require(sum(glue + len(part) for part in text if isinstance(part, str)))
        elif name in ("format", "format_map") and isinstance(text, str):
            budget.require(_format_chars(text) + sum(len(value) for value in texts))
        elif name == "tojson":
            budget.require(max([abs(number) for number in numbers], default=0))
        elif name in _PADDED:
            lines = text.count("\n") + text.count("\t") + 1 if isinstance(text, str) else 1
            budget.require(lines * max([abs(number) for number in numbers], default=0))
            budget.require(lines * max(map(len, texts), default=0))


class _CountingGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_counted((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _format_chars(template: str) -> int:
    """More than the digits of any width in a format can ask for."""
    digits, total = "", len(template)
    for letter in f"{template} ":
        if letter.isdigit():
            digits = (digits + letter)[:12]
        elif digits:
            total += int(digits)
            digits = ""
    return total
