"""What a switch is: its declaration, the stage it acts at, what it needs, and how a typed-in value is read."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

from ortlab.errors import OptionError

Value: TypeAlias = "bool | int | str | tuple[str, ...]"
_T = TypeVar("_T", bool, int, str, "tuple[str, ...]")

METADATA_KEY = "ortlab.switch"

_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"0", "false", "off", "no"})
_PLAN = re.compile(r"(?P<cluster>[A-Za-z0-9_+.]+):(?P<strategy>[012]):(?P<count>-1|\d+)")
_OLD_PLAN = re.compile(r"(?P<cluster>[A-Za-z0-9_+.]+):(?P<strategy>[012])")


class Effect(enum.IntEnum):
    """The earliest stage that has to be redone before a changed switch acts; smaller is earlier and dearer."""

    IMPORT = 0
    WRAP = 1
    EXPORT = 2
    GRAPH = 3
    SESSION = 4
    STEP = 5


class Group(enum.Enum):
    """The five groups in which switches are shown."""

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
    GPU_ALLOCATOR = "gpu_allocator"
    DEEPSPEED = "deepspeed"


REASONS: Mapping[Need, str] = {
    Need.CUDA: "needs an NVIDIA GPU that both PyTorch and ONNX Runtime see: install `ortlab[cuda]` on a machine with one",
    Need.AMPERE: "needs an NVIDIA GPU of compute capability 8.0 or newer (Ampere: A100, RTX 30)",
    Need.TRITON: "needs the triton package: `pip install triton`",
    Need.TRITON_BUILD: "needs an ONNX Runtime built with Triton, which only the CUDA package is: install `ortlab[cuda]`",
    Need.GPU_ALLOCATOR: (
        "needs ORT's extension torch_gpu_allocator, compiled with the CUDA toolkit: "
        "`python -m onnxruntime.training.ortmodule.torch_cpp_extensions.install`"
    ),
    Need.DEEPSPEED: "needs DeepSpeed: `pip install deepspeed`",
}


@dataclass(frozen=True)
class Switch:
    """One switch as it was declared; everything that shows switches is generated from these records.

    Attributes
    ----------
    name
        Field of `ortlab.Options`.
    type
        `bool`, `int`, `str` or `tuple` (of strings).
    default
        ortlab's default.
    ort_default
        Default of onnxruntime-training 1.19.2; differs from `default` only where the help says why.
    effect
        Earliest stage that has to be redone before a change acts.
    group
        Where it is shown.
    help
        One or two sentences: what it does to time, memory or numbers.
    env
        Environment variable that 1.19.2 reads, or "" if it has none.
    older_env
        Variables of earlier releases that 1.19.2 ignores and ortlab translates.
    needs
        Everything that must be present before the switch can act.
    choices
        The only values allowed; empty if any value of the type is.
    minimum
        Smallest number allowed; None if any is.
    part_of
        Switch that must be on for this one to act, or "".
    """

    name: str
    type: type[bool] | type[int] | type[str] | type[tuple[str, ...]]
    default: Value
    ort_default: Value
    effect: Effect
    group: Group
    help: str
    env: str = ""
    older_env: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    choices: tuple[Value, ...] = ()
    minimum: int | None = None
    part_of: str = ""

    @property
    def example(self) -> str:
        """A value that this switch takes, as a user would type it."""
        if self.choices:
            return repr(self.choices[-1])
        if self.name == "memory_plan":
            return "['Gelu+:1:-1']"
        examples = {bool: "True", int: str(self.default), str: "'runs/graphs'", tuple: "['Cast', 'Reshape']"}
        return examples[self.type]

    def read(self, value: object) -> Value:
        """Turn a value that a user, a magic or an environment variable gave into this switch's type.

        Parameters
        ----------
        value
            The value itself, or text that spells it: "1", "true", "off", "INFO", "a,b".

        Returns
        -------
        Value
            A value of `type` within `choices` and `minimum`.

        Raises
        ------
        OptionError
            The value does not fit; the message names the type expected and an example.
        """
        if isinstance(value, str):
            value = value.strip()
        if self.type is bool:
            return self._read_bool(value)
        if self.type is int:
            return self._within(self._read_int(value))
        if self.type is str:
            return self._within(self._read_str(value))
        return self._read_tuple(value)

    def _read_bool(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        text = str(value).lower() if isinstance(value, (str, int)) else ""
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise self._refuse(value, "True or False")

    def _read_int(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
            return int(value)
        raise self._refuse(value, "a whole number")

    def _read_str(self, value: object) -> str:
        if not isinstance(value, (str, os.PathLike)):
            raise self._refuse(value, "text")
        text = os.fspath(value)
        return text.upper() if self.choices else text

    def _read_tuple(self, value: object) -> tuple[str, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, Iterable):
            raise self._refuse(value, "a list of strings, or one string with commas")
        parts: list[str] = []
        for item in items:
            if not isinstance(item, str):
                raise self._refuse(value, "a list of strings, or one string with commas")
            # A plan of several clusters is one string with commas in ORT's own lists, so items are split too.
            parts += [part.strip() for part in item.split(",") if part.strip()]
        if self.choices:
            parts = [part.upper() for part in parts]
        for part in parts:
            self._within(part)
            if self.name == "memory_plan" and not _PLAN.fullmatch(part):
                raise self._refuse(part, "plans of the form <cluster>:<strategy 0, 1 or 2>:<count, or -1 for all>")
        return tuple(dict.fromkeys(parts))

    def _within(self, value: Value) -> Value:
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in self.choices], n=1)
            one_of = "one of " + ", ".join(map(str, self.choices))
            raise self._refuse(value, one_of + (f" (did you mean {near[0]}?)" if near else ""))
        if self.minimum is not None and isinstance(value, int) and value < self.minimum:
            raise self._refuse(value, f"a whole number of at least {self.minimum}")
        return value

    def _refuse(self, value: object, expected: str) -> OptionError:
        return OptionError(
            f"{self.name} cannot be {value!r}.",
            why=f"It takes {expected}.",
            fix=f"Write for example {self.name}={self.example}.",
        )


def switch(
    default: _T,
    *,
    effect: Effect,
    group: Group,
    help: str,  # noqa: A002 - the word that argparse and ipywidgets users know
    env: str = "",
    older_env: tuple[str, ...] = (),
    needs: tuple[Need, ...] = (),
    choices: tuple[_T, ...] | tuple[str, ...] = (),
    minimum: int | None = None,
    part_of: str = "",
    ort_default: _T | None = None,
) -> _T:
    """Declare a switch as a dataclass field; the parameters are the attributes of `Switch`."""
    declaration = Switch(
        name="",
        type=type(default),
        default=default,
        ort_default=default if ort_default is None else ort_default,
        effect=effect,
        group=group,
        help=help,
        env=env,
        older_env=older_env,
        needs=needs,
        choices=choices,
        minimum=minimum,
        part_of=part_of,
    )
    return cast("_T", dataclasses.field(default=default, metadata={METADATA_KEY: declaration}))


def declared(record: type[object]) -> tuple[Switch, ...]:
    """Every switch that a dataclass declares, in the order of its fields."""
    return tuple(
        dataclasses.replace(field.metadata[METADATA_KEY], name=field.name)
        for field in dataclasses.fields(record)  # type: ignore[arg-type]
    )


def translate_old_plans(text: str) -> tuple[str, ...]:
    """Translate ORTMODULE_ENABLE_MEMORY_ALLEVIATION, which 1.19.2 no longer reads, to plans.

    Parameters
    ----------
    text
        "Dropout:0,Gelu:1,Tile:0" (operator and 0 or 1) or "BiasGelu+:1:-1" (today's form).

    Returns
    -------
    tuple of str
        Plans of today's form; entries with strategy 0 (off) are left out.
    """
    plans = []
    for raw in text.split(","):
        entry = raw.strip()
        old = _OLD_PLAN.fullmatch(entry)
        if old and old["strategy"] != "0":
            plans.append(f"{old['cluster'].rstrip('+')}+:{old['strategy']}:-1")
        elif not old and entry and not entry.endswith(":0"):
            plans.append(entry)
    return tuple(plans)
