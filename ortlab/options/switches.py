"""What a switch is: its declaration, the stage it acts at, what it needs, and how its values are read."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import numbers
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar, cast

from ortlab.errors import OptionError

Value: TypeAlias = "bool | int | str | tuple[str, ...]"
_T = TypeVar("_T", bool, int, str, tuple[str, ...])

_METADATA_KEY = "ortlab.switch"
_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"0", "false", "off", "no"})

_LARGEST = 2**31 - 1
"""ONNX Runtime keeps its settings in 32 bits."""


class Effect(enum.IntEnum):
    """The earliest stage to redo before a changed switch acts; smaller is earlier and dearer."""

    WRAP = 1
    EXPORT = 2
    GRAPH = 3
    SESSION = 4
    STEP = 5


class Group(enum.Enum):
    """The groups in which switches are declared and shown."""

    COMPUTE = "compute"
    MEMORY = "memory"
    EXPORT = "export"
    LOGGING = "logging"
    EXPERIMENTAL = "experimental"


class Need(enum.Enum):
    """Something outside ortlab that a switch cannot act without."""

    CUDA = "cuda"
    AMPERE = "ampere"
    TRITON = "triton"
    TRITON_BUILD = "triton_build"
    DEEPSPEED = "deepspeed"


REASONS: Mapping[Need, str] = {
    Need.CUDA: (
        "needs an NVIDIA GPU that PyTorch and ONNX Runtime both see: "
        "install `ortlab[cuda]` on a machine that has one"
    ),
    Need.AMPERE: "needs an NVIDIA GPU of compute capability 8.0 or newer, such as an A100",
    Need.TRITON: "needs the triton package: `pip install triton`",
    Need.TRITON_BUILD: "needs an ONNX Runtime that was built with Triton: install `ortlab[cuda]`",
    Need.DEEPSPEED: "needs DeepSpeed: `pip install deepspeed`",
}


@dataclass(frozen=True)
class Syntax:
    """How the items of a list have to be written."""

    pattern: str  # regular expression that an item matches in full
    words: str  # the same in words, for an error message
    example: str


# ORT's own syntax of a recompute plan (memory_optimizer_config); count -1 stands for all occurrences.
PLAN = Syntax(
    pattern=r"[A-Za-z0-9_+.]+:[012]:(-1|[0-9]{1,9})",
    words="plans of the form <cluster>:<strategy 0, 1 or 2>:<count, -1 for all>",
    example="Gelu+:1:-1",
)

LAYERS: Final = "layers"
MATMULS: Final = "matmuls"
LINEAR: Final = "linear"
HALVES: Final = "1/2"
NESTED: Final = "nested"
ALL_BUT_MATMULS: Final = f"all but {MATMULS}"

NESTED_HALVES: Final = f"{HALVES} {NESTED}"
WAYS: Final = (NESTED_HALVES, HALVES, "", LINEAR, MATMULS)
"""What may happen in each of several layers: `LayerRange.way`."""

LAST_LAYER: Final = 1000
"""Above the number of any layer."""

_SLICE: Final = r"\[([0-9]{0,3}):([0-9]{0,3})\]"
_LAYER_WORDS: Final = (
    rf"{LAYERS}(?:{_SLICE})?(?!(?::1)? {NESTED})(?::({HALVES}|[1-9][0-9]{{0,2}}))?"
    rf"(?: but ({MATMULS}|{LINEAR})| ({NESTED}))?"
)


@dataclass(frozen=True)
class LayerRange:
    """Layers that are recomputed, numbered through the model: "layers[4:8] but linear"."""

    first: int = 0
    end: int | None = None  # not included; None for the last one and all
    together: int = 1  # how many in one stretch
    kept: str = ""  # what is kept inside: "matmuls", "linear" or nothing
    halves: bool = False  # whether each layer is two stretches, with what the first hands on kept as well
    # Whether what is handed on inside, from layer to layer or from half to half, is made again first, and not kept.
    nested: bool = False

    @property
    def way(self) -> str:
        """What happens in each layer, "1/2 nested"; empty where only what it hands on is kept."""
        return self.kept if not self.halves else NESTED_HALVES if self.nested else HALVES

    @classmethod
    def in_way(cls, way: str, first: int = 0, end: int | None = None) -> LayerRange:
        """Return layers that are recomputed in a `way`."""
        halves = way.startswith(HALVES)
        return cls(first, end, kept="" if halves else way, halves=halves, nested=way.endswith(NESTED))

    def __str__(self) -> str:
        """Write it as the switch `recompute` takes it."""
        some = self.first or self.end is not None
        numbers = f"[{self.first or ''}:{'' if self.end is None else self.end}]" if some else ""
        stretch = f":{HALVES}" if self.halves else f":{self.together}" if self.together > 1 else ""
        inside = f" but {self.kept}" if self.kept else f" {NESTED}" if self.nested else ""
        return f"{LAYERS}{numbers}{stretch}{inside}"


def read_layers(word: str) -> LayerRange | None:
    """Read what `str` of a range writes; None for another word."""
    found = re.fullmatch(_LAYER_WORDS, word)
    if found is None:
        return None
    first, end, together, kept, nested = found.groups()
    halves = together == HALVES
    count = 1 if halves else int(together or 1)
    return LayerRange(int(first or 0), int(end) if end else None, count, kept or "", halves, bool(nested))


def kept_words(words: Iterable[str]) -> tuple[str, str]:
    """Say what the backward gets where the switch `recompute` is so set, and what of the rest it makes again."""
    told = tuple(words)
    ranges = [one for one in map(read_layers, told) if one is not None]
    inside = {one.rpartition(" but ")[2] for one in told if " but " in one}
    products = ((MATMULS, "matmuls"), (LINEAR, "linear layers"))
    returned = " and ".join(word for name, word in products if name in inside)
    if not ranges and told[0].startswith("all but "):
        return f"what {returned} return", "everything else"
    if not ranges:
        return f"what {', '.join(one.partition(' but ')[0] for one in told)} read and return", "their rest"
    rest = f", what {returned} return where that is said," if returned else ""
    plain = any(one.halves and not one.nested for one in ranges)
    halves = " (and, with :1/2, what its first half does)" if plain else ""
    others = "; all other layers keep everything" if all(one.end is not None for one in ranges) else ""
    again = (
        ", from values that are recomputed first where that is nested"
        if any(one.nested for one in ranges)
        else ""
    )
    stretch = "layers" if all(one.together == 1 for one in ranges) else "stretches of layers"
    return f"what each of these {stretch} hands to the next{halves}{rest}", f"their rest{again}{others}"


_PATHS: Final = r"[\w*?\[\]!-]+(\.[\w*?\[\]!-]+)*"

# What the backward recomputes: words of ortlab's own, or paths of modules, with the signs of a pattern.
RECOMPUTE = Syntax(
    pattern=rf"{_LAYER_WORDS}|(all|{_PATHS}) but ({MATMULS}|{LINEAR})|{_PATHS}",
    words=f'"{LAYERS}", "{LAYERS}:2" (two together), "{LAYERS}:1/2" (each in two stretches), "{LAYERS}:4 {NESTED}" '
    f'(four together, layer by layer inside), "{LAYERS}:1/2 {NESTED}", "{LAYERS}[:4]" (the first four), '
    f'"{LAYERS}[4:] but {LINEAR}", "{ALL_BUT_MATMULS}", or paths of modules and patterns of such',
    example="encoder.layer.*.attention",
)

# A type of ONNX operator; ONNX Runtime takes any text, and one that names none does nothing.
OPERATOR = Syntax(
    pattern=r"[A-Z][A-Za-z0-9_]*",
    words="names of ONNX operators, as graphs have them",
    example="Reshape",
)


@dataclass(frozen=True)
class Switch:
    """One switch as declared; everything that shows or checks switches is generated from these records."""

    name: str  # field of `ortlab.Options`
    group: Group
    type: type[bool | int | str | tuple[str, ...]]
    default: Value
    ort_default: Value  # of onnxruntime-training 1.19.2; where it differs from `default`, `help` says why
    effect: Effect
    help: str  # one or two sentences: what it does, and what that means for time, memory or numbers
    when: str  # the end of "Change it when ..."
    unless: str  # the end of "Leave it when ..."
    env: str = ""  # environment variable that 1.19.2 reads
    older_env: tuple[str, ...] = ()  # of earlier releases: 1.19.2 ignores them, ortlab translates them
    needs: tuple[Need, ...] = ()  # all of them must be present
    choices: tuple[Value, ...] = ()  # the only values (of a tuple: items) allowed; empty if any will do
    minimum: int | None = None
    syntax: Syntax | None = None  # of the items of a tuple
    part_of: str = ""  # switch that must be on for this one to act
    # Why 1.19.2 cannot do it right, as the end of a sentence that begins with the name; ortlab then refuses it.
    broken: str = ""

    @property
    def example(self) -> str:
        """A value that this switch takes, as Python text."""
        if self.type is tuple:
            return repr([self.syntax.example if self.syntax else str(self.choices[0])])
        if self.choices:
            return repr(self.choices[-1])
        return {bool: "True", int: str(self.default), str: "'some/path'"}[self.type]

    @property
    def advice(self) -> tuple[str, str]:
        """When to change this switch from its default, and when to leave it: two sentences."""
        return f"Change it when {self.when}.", f"Leave it when {self.unless}."

    def read(self, value: object) -> Value:
        """Turn what a user, a magic or an environment variable gave into a value that this switch allows."""
        # Text may spell one: "1", "true", "off", "info", "a,b".
        if type(value) is str:  # and not a path that knows what was read there: `ortlab.options.option_files`
            value = value.strip()
        if self.type is bool:
            return self._read_bool(value)
        if self.type is int:
            return self._read_int(value)
        if self.type is str:
            return self._read_str(value)
        return self._read_tuple(value)

    def _read_bool(self, value: object) -> bool:
        text = str(value).lower() if isinstance(value, (str, int)) else ""
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise self._refusal(value, "True or False")

    def _read_int(self, value: object) -> int:
        # More digits than any number here has; Python itself refuses to read thousands of them.
        spelled = isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,99}", value)
        if not spelled and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
            raise self._refusal(value, "a whole number")
        number = int(cast("int", value))
        if self.minimum is not None and number < self.minimum:
            raise self._refusal(value, f"a whole number of at least {self.minimum}")
        if abs(number) > _LARGEST:
            raise self._refusal(value, f"a whole number up to {_LARGEST}")
        return cast("int", self._chosen(number))

    def _read_str(self, value: object) -> str:
        if not isinstance(value, (str, os.PathLike)):
            raise self._refusal(value, "text")
        text = os.fspath(value)
        # Each text ends up in a variable of the environment, in the name of a file, or in both.
        if not isinstance(text, str) or "\0" in text or not _encodable(text):
            raise self._refusal(value, "text that a file can be named with")
        return cast("str", self._chosen(text))

    def _read_tuple(self, value: object) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Iterable) or isinstance(items, Mapping):
            raise self._refusal(value, "a list of strings, or one string with commas")
        parts: list[str] = []
        for item in items:
            if not isinstance(item, str):
                raise self._refusal(value, "a list of strings, or one string with commas")
            # Items are split as well: ORT writes a plan for several clusters as one string with commas.
            parts += [cast("str", self._chosen(part.strip())) for part in item.split(",") if part.strip()]
        for part in parts:
            if self.syntax and not re.fullmatch(self.syntax.pattern, part):
                raise self._refusal(part, self.syntax.words)
        unique = dict.fromkeys(parts)
        return tuple(choice for choice in self.choices if choice in unique) if self.choices else tuple(unique)

    def _chosen(self, value: int | str) -> int | str:
        if not self.choices:
            return value
        if isinstance(value, str):
            value = value.upper()
        if value not in self.choices:
            near = self._near(value)
            hint = f" (did you mean {near}?)" if near is not None else ""
            raise self._refusal(value, f"one of {', '.join(map(str, self.choices))}{hint}")
        return value

    def _near(self, value: int | str) -> Value | None:
        """Return the choice that was meant: the nearest number, or the text that is most like it."""
        if isinstance(value, int):
            return min(
                (one for one in self.choices if isinstance(one, int)), key=lambda one: abs(one - value)
            )
        near = difflib.get_close_matches(value, [one for one in self.choices if isinstance(one, str)], n=1)
        return near[0] if near else None

    def _refusal(self, value: object, expected: str) -> OptionError:
        if self.choices and not expected.startswith("one of"):
            expected += f": one of {', '.join(map(str, self.choices))}"
        means_off = 0 in self.choices and str(value).lower() in _FALSE
        return OptionError(
            f"{self.name} cannot be {shown(value)}.",
            why=f"It takes {expected}.",
            fix=f"Off is {self.name}=0." if means_off else f"Write for example {self.name}={self.example}.",
        )


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """Write a value as Python does, short enough for an error message."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def switch(  # noqa: PLR0913 - each is one fact of the declaration, given by name
    *,
    default: _T,
    effect: Effect,
    help: str,  # noqa: A002 - the word that argparse has for it
    when: str,
    unless: str,
    ort_default: _T | None = None,
    env: str = "",
    older_env: tuple[str, ...] = (),
    needs: tuple[Need, ...] = (),
    choices: tuple[Value, ...] = (),
    minimum: int | None = None,
    syntax: Syntax | None = None,
    part_of: str = "",
    broken: str = "",
) -> _T:
    """Declare a switch as a field of a dataclass; the parameters are the attributes of `Switch`."""
    facts = {
        "type": type(default),
        "default": default,
        "ort_default": default if ort_default is None else ort_default,
        "effect": effect,
        "help": help,
        "when": when,
        "unless": unless,
        "env": env,
        "older_env": older_env,
        "needs": needs,
        "choices": choices,
        "minimum": minimum,
        "syntax": syntax,
        "part_of": part_of,
        "broken": broken,
    }
    field: _T = dataclasses.field(default=default, metadata={_METADATA_KEY: facts})
    return field


def declared(record: type[object], group: Group) -> tuple[Switch, ...]:
    """Return every switch that a dataclass declares, in the order of its fields."""
    return tuple(
        Switch(name=field.name, group=group, **field.metadata[_METADATA_KEY])
        for field in dataclasses.fields(record)  # type: ignore[arg-type]
    )
