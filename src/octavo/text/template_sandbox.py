"""The jinja2 environment in which chat templates run. Imported only when a template is first rendered.

Templates come with a checkpoint from strangers. The sandbox of jinja2 keeps them from Python's internals; the limits here
keep them from running or growing without end: every loop step and call looks at the clock, and no operator, format or
print makes or takes a text above MAX_TEXT. What remains possible are single built-in calls that are slow on texts of that size.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from time import monotonic
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT = 1 << 24  # characters; the longest contexts of real models are 2^20 tokens
MAX_WIDTH = 10_000  # of padding and indentation

_deadline: ContextVar[float] = ContextVar("deadline")
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)|:[^{}]*\d{5}|:[^{}]*\{")  # a width above 9999, or one that is computed
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class _Bounds(NodeTransformer):
    """Rewrites a template's tree: loops tick, and ``~`` goes through a function that looks at sizes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Put a tick at the head of a loop's body."""
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """``a ~ b`` becomes a call."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concat_texts"), node.nodes, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks an assistant's text for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements between the tags, with their own scope (as transformers has it)."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Set up as transformers does: trimmed blocks, loop controls, plain tojson, raise_exception, strftime_now."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], finalize=_printed)
        self.filters["tojson"] = _tojson
        self.filters["center"] = _narrow(self.filters["center"])
        self.filters["indent"] = _narrow(self.filters["indent"])
        self.filters["format"] = _narrow_format
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=lambda *a, **k: dict(*a, **k))
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return tree

    def tick(self) -> str:
        """Stop a template whose time is over."""
        if monotonic() > _deadline.get(float("inf")):
            raise SecurityError("it takes too long")
        return ""

    def concat_texts(self, *parts: Any) -> str:
        """``a ~ b``."""
        text: str = _sized("".join([str(_sized(part)) for part in parts]))
        return text

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from a template."""
        if __obj != self.tick:
            self.tick()
        if getattr(__obj, "__name__", "") in _PADDING:
            _check_width(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``text.format`` and ``text.format_map``."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator on values; refused where the result would be enormous."""
        if operator == "**" and not (isinstance(right, int | float) and isinstance(left, int | float) and abs(right) <= 64 and abs(left) <= 1e6):
            raise SecurityError("a power is too large")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > MAX_TEXT:
                    raise SecurityError(f"a repetition of {len(text) * times} items is too large")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise SecurityError("a number is too large")
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple) and len(left) + len(right) > MAX_TEXT:
            raise SecurityError(f"a sum of {len(left) + len(right)} items is too large")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Renderings inside this block stop after ``seconds``."""
    token = _deadline.set(monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def _sized(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise SecurityError(f"a text of {len(value)} characters is too long")
    return value


_printed = _sized  # what {{ … }} prints


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as models were trained on: unlike jinja2's own filter, nothing is escaped for HTML."""
    if indent is not None:
        _check_width((indent,), {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _check_width(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for width in (*args, *kwargs.values()):
        if (isinstance(width, int) and width > MAX_WIDTH) or (isinstance(width, str) and len(width) > MAX_WIDTH):
            raise SecurityError(f"a width above {MAX_WIDTH} is too large")


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise SecurityError("a format has a width that is too large or computed")


def _narrow(function: Callable[..., str]) -> Callable[..., str]:
    def narrow(text: Any, *args: Any, **kwargs: Any) -> str:
        _check_width(args, kwargs)
        return function(text, *args, **kwargs)

    return narrow


def _narrow_format(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text))
    return str(text) % (kwargs or args)
