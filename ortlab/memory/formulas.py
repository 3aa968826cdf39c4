"""Sizes as ORT writes them: arithmetic over symbolic dimensions, read without ever executing any of it.

A formula may come from a log that somebody pasted, so it is taken apart here and not given to `eval`, which
`sympy.sympify` calls.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Final

from ortlab.errors import OptionError

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d{1,60}(?:\.\d{0,60})?(?:[eE][+-]?\d{1,2})?)|(?P<name>[^\W\d][\w.:]*)|(?P<sign>\*\*|//|[-+*/%(),]))"
)

_DEEPEST: Final = 60
"""Brackets inside brackets; ORT writes about ten."""

_LONGEST: Final = 1_000_000
"""Characters; ORT's longest sums, one term for each of some hundred places, have a hundredth of it."""

_LARGEST_BITS: Final = 4096
"""The most bits of a number on the way; a size in bytes has 64."""


_FUNCTIONS: Final[dict[str, tuple[int, Callable[..., Any], str]]] = {
    "floor": (1, math.floor, "floor"),
    "ceiling": (1, math.ceil, "ceiling"),
    "ceil": (1, math.ceil, "ceiling"),
    "Max": (2, max, "Max"),
    "max": (2, max, "Max"),
    "Min": (2, min, "Min"),
    "min": (2, min, "Min"),
    "Mod": (2, operator.mod, "Mod"),
}
"""What shape inference may put around sizes: least number of arguments, what it does with numbers, sympy's name."""


@dataclass(frozen=True)
class Formula:
    """A size that has been read."""

    text: str  # as it was written
    # Its parts in the order of evaluation: numbers, names, and operators with the number of their arguments.
    code: tuple[tuple[str, Any, int], ...]

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The symbolic dimensions in it, in the order of their names."""
        return tuple(sorted({what for kind, what, _ in self.code if kind == "name"}))

    def value(self, sizes: Mapping[str, int]) -> float | None:
        """Evaluate it with a value for each symbol; None where one has no value.

        Raises OptionError where it divides by zero, or comes to no size that a computer could have.
        """
        if any(name not in sizes for name in self.symbols):
            return None
        functions = {name: function for name, (_, function, _) in _FUNCTIONS.items()}
        with self._refused():
            return float(self._run(sizes, functions, _checked))

    @cached_property
    def simplified(self) -> str:
        """The same with its terms put together, as sympy writes it."""
        import sympy

        names = {name: sympy.Symbol(name, positive=True, integer=True) for name in self.symbols}
        functions = {name: getattr(sympy, called) for name, (_, _, called) in _FUNCTIONS.items()}
        # Not sympy.simplify, which tries everything that it knows and takes forty times as long for the same.
        with self._refused():
            return str(sympy.factor_terms(sympy.expand(self._run(names, functions, _as_sympy))))

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except (ZeroDivisionError, OverflowError) as error:
            raise _refusal(self.text, f"It comes to no size: {error}.") from None

    def _run(
        self,
        values: Mapping[str, Any],
        functions: Mapping[str, Callable[..., Any]],
        taken: Callable[[Any], Any],
    ) -> Any:
        stack: list[Any] = []
        for kind, what, count in self.code:
            if kind == "number":
                result = what
            elif kind == "name":
                result = values[what]
            else:
                function = functions[what] if kind == "call" else _OPERATORS[what, count]
                result = function(*stack[-count:])
                del stack[-count:]
            stack.append(taken(result))
        return stack.pop()


def _power(base: Any, exponent: Any) -> Any:
    if exponent not in range(17):
        raise OverflowError("an exponent is no whole number from 0 to 16")
    return base ** int(exponent)


_OPERATORS: Final[dict[tuple[str, int], Callable[..., Any]]] = {
    ("-", 1): operator.neg,
    ("+", 2): operator.add,
    ("-", 2): operator.sub,
    ("*", 2): operator.mul,
    ("/", 2): operator.truediv,
    ("//", 2): operator.floordiv,
    ("%", 2): operator.mod,
    ("**", 2): _power,
}


def _checked(value: Any) -> Fraction:
    number = Fraction(value)
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _LARGEST_BITS:
        raise OverflowError("a number on the way is too large")
    return number


def _as_sympy(value: Any) -> Any:
    if isinstance(value, (int, Fraction)):
        import sympy

        number = _checked(value)
        return sympy.Rational(number.numerator, number.denominator)
    return value


@lru_cache(maxsize=4096)
def read(text: str) -> Formula:
    """Read a formula, such as "((input_ids_dim0)*(128)) * 4 * 1.000000", "640.0*a*b**2" or "floor(a/2)".

    Raises OptionError where it is not arithmetic over symbols; nothing of it is executed.
    """
    if len(text) > _LONGEST:
        raise _refusal(text, f"It has {len(text):,} characters.")
    return Formula(text, tuple(_Parser(text).sum_to_end()))


Code = Iterator[tuple[str, Any, int]]


class _Parser:
    """Recursive descent over one formula; sums and products are loops, so that long ones need no deep stack."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*self._tokenize(), ("end", "")]
        self._next = 0
        self._depth = 0

    def sum_to_end(self) -> Code:
        """Yield the parts of the whole text."""
        yield from self._sum()
        if self._tokens[self._next][0] != "end":
            raise self._unexpected()

    def _tokenize(self) -> Iterator[tuple[str, str]]:
        position = 0
        while position < len(self._text.rstrip()):
            found = _TOKEN.match(self._text, position)
            if found is None:
                raise _refusal(self._text, f"{self._text[position : position + 10]!r} is no arithmetic.")
            kind = str(found.lastgroup)
            yield kind, found[kind]
            position = found.end()

    def _take(self, *signs: str) -> str:
        kind, text = self._tokens[self._next]
        if kind != "sign" or text not in signs:
            return ""
        self._next += 1
        return text

    def _sum(self) -> Code:
        yield from self._product()
        while sign := self._take("+", "-"):
            yield from self._product()
            yield ("operator", sign, 2)

    def _product(self) -> Code:
        yield from self._signed()
        while sign := self._take("*", "/", "//", "%"):
            yield from self._signed()
            yield ("operator", sign, 2)

    def _signed(self) -> Code:
        signs = []
        while sign := self._take("-", "+"):
            signs.append(sign)
        yield from self._atom()
        if self._take("**"):
            yield from self._atom()
            yield ("operator", "**", 2)
        if signs.count("-") % 2:
            yield ("operator", "-", 1)

    def _atom(self) -> Code:
        kind, text = self._tokens[self._next]
        if kind == "number":
            self._next += 1
            yield ("number", Fraction(text), 0)
        elif kind == "name":
            self._next += 1
            yield from self._name(text)
        elif self._take("("):
            yield from self._bracketed()
            if not self._take(")"):
                raise self._unexpected()
        else:
            raise self._unexpected()

    def _name(self, name: str) -> Code:
        if not self._take("("):
            yield ("name", name, 0)
            return
        if name not in _FUNCTIONS:
            raise _refusal(self._text, f"{name[:40]} is no function of sizes.")
        count = 1
        yield from self._bracketed()
        while self._take(","):
            count += 1
            yield from self._bracketed()
        least = _FUNCTIONS[name][0]
        if not self._take(")") or count < least or (least == 1 and count > 1):
            raise self._unexpected()
        yield ("call", name, count)

    def _bracketed(self) -> Code:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _refusal(self._text, f"It has more than {_DEEPEST} brackets inside brackets.")
        yield from self._sum()
        self._depth -= 1

    def _unexpected(self) -> OptionError:
        kind, text = self._tokens[self._next]
        where = "its end" if kind == "end" else repr(text[:40])
        return _refusal(self._text, f"{where[0].upper()}{where[1:]} stands where a number or a name should.")


def _refusal(text: str, why: str) -> OptionError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - what fits into a line
    return OptionError(
        f"{shown!r} is no size.", why=why, fix="Write sums, products and powers of numbers and symbols."
    )
