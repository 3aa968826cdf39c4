"""Options: one value for every switch of ORTModule."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortlab.errors import OptionError, did_you_mean
from ortlab.options import variables
from ortlab.options.catalogue import declaration, switches, table, unmet, variable_names
from ortlab.options.declarations import Compute, Experimental, Export, Logging, Memory
from ortlab.options.switches import LAST_LAYER, Effect, Group, Need, Switch, Value, read_layers, shown
from ortlab.shown import Shown

__all__ = [
    "Effect",
    "Group",
    "Need",
    "Options",
    "Switch",
    "check_needs",
    "declaration",
    "setting_words",
    "switches",
    "table",
    "unmet",
    "variable_names",
]

_VALUE_WIDTH: Final = 28  # characters of a value in a title


@dataclass(frozen=True, kw_only=True, repr=False)
class Options(Shown, Compute, Memory, Export, Logging, Experimental):
    """One value for every switch of ORTModule; a change makes a new record.

    The defaults are those of onnxruntime-training 1.19.2, except where a help text says otherwise. Values may
    be given as text ("on", "0", "info", "Gelu+:1:-1,Cast+:1:-1"), as magics and environment variables do.
    The switches are declared in `ortlab.options.declarations`; `table()` lists them.

    Raises
    ------
    OptionError
        A value has the wrong type, or two values contradict each other.

    Examples
    --------
    >>> Options(memory_level="1").replace(log_level="info")
    Options(memory_level=1, log_level='INFO')
    """

    def __post_init__(self) -> None:
        """Read text into values, and refuse values that contradict each other."""
        for one in switches():
            object.__setattr__(self, one.name, one.read(getattr(self, one.name)))
        if self.memory_level > 0 and self.memory_plan:
            raise OptionError(
                f"memory_level={self.memory_level} and memory_plan contradict each other.",
                why="Levels 1 and 2 choose the plans themselves and ignore a list of plans.",
                fix="Set memory_level=0 to use the plans, or memory_plan=() to use the level.",
            )
        clusters = Counter(plan.split(":")[0] for plan in self.memory_plan)
        twice = [cluster for cluster, count in clusters.items() if count > 1]
        if twice:
            raise OptionError(
                f"memory_plan has two plans for {twice[0]}.",
                why="A cluster is recomputed in one way only.",
                fix="Keep one of the two.",
            )
        _check_recompute(self.recompute)
        if self.cast_allow:
            _check_operators(self.cast_allow)
        if set(self.save_onnx_prefix) & {"/", "\\"}:
            raise OptionError(
                f"save_onnx_prefix cannot be {self.save_onnx_prefix!r}.",
                why="It is the start of the files' names, and names no folder.",
                fix="Put the folder into save_onnx_path.",
            )
        if self.mem_efficient_grad_management and not self.custom_autograd:
            raise OptionError(
                "mem_efficient_grad_management is on, but custom_autograd is off.",
                why="Gradients are handed over by a custom autograd Function.",
                fix="Set custom_autograd=True, or leave mem_efficient_grad_management off.",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> tuple[Options, tuple[str, ...]]:
        """Read the ORTMODULE_* variables, of 1.19.2 and of earlier releases.

        Parameters
        ----------
        environ
            Usually `os.environ`; it is not changed. ORTMODULE_JSON_CONFIG_PATH names a file of ORTModule's
            own JSON configuration, which the other variables override.

        Returns
        -------
        options : Options
            The defaults, overridden by the variables that are set.
        notes : tuple of str
            One sentence for each variable that is translated, ignored or sets something.

        Raises
        ------
        OptionError
            A variable has a value that makes no sense, or two contradict each other; the message names them.
        """
        changes: dict[str, Value] = {}
        notes: tuple[str, ...] = ()
        if environ.get(variables.JSON_CONFIG):
            changes = variables.read_json_config(Path(environ[variables.JSON_CONFIG]))
            notes = tuple(
                f"{variables.JSON_CONFIG} sets {name}={value!r}." for name, value in changes.items()
            )
        set_by_name, more_notes = variables.read(environ)
        changes |= set_by_name
        try:
            # Not `replace`: 1.19.2 lets a variable pass whose whole is off, and it may be switched on later.
            options = dataclasses.replace(cls(), **changes)  # type: ignore[arg-type]
            waiting = tuple(
                f"{name} acts once {declaration(name).part_of} is on."
                for name in changes
                if getattr(options, name) is True and not options.acts(name)
            )
            return options, notes + more_notes + waiting
        except OptionError as error:
            behind = [one.env for one in switches() if one.name in set_by_name and one.name in error.what]
            raise OptionError(
                error.what,
                why=error.why,
                fix=f"Change or unset one of {', '.join(behind) or variables.JSON_CONFIG}.",
            ) from None

    def environment(self, memory_plan_file: Path | None = None) -> dict[str, str]:
        """Write the options as the variables that 1.19.2 reads, for use inside a build.

        Parameters
        ----------
        memory_plan_file
            File that the caller has written `memory_plan` to, as a JSON list: 1.19.2 takes plans from a file
            only.

        Returns
        -------
        dict of str to str
            Variables to set. All others of `variable_names()` have to be unset for the build: where 1.19.2
            takes even an empty text for a path or for "on", only absence means the default.

        Raises
        ------
        ValueError
            There are plans, but no file is given.
        """
        if self.memory_plan and memory_plan_file is None:
            raise ValueError("memory_plan is not empty: write it to a JSON file and pass its path")
        values = {one.name: self._acting(one) for one in switches()}
        return variables.write(values, memory_plan_file)

    def replace(self, **changes: object) -> Options:
        """Make a record with some options changed.

        Parameters
        ----------
        **changes
            Options by name. Text is read: "on", "0", "info", "Gelu+:1:-1,Cast+:1:-1".

        Raises
        ------
        OptionError
            An option is unknown (the near name is suggested), a value has the wrong type, two values
            contradict each other, or an option is switched on that is part of one that is off.
        """
        declarations = [declaration(name) for name in changes]
        result = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        # A default that is on below a switch that is off does no harm, and ORTModule itself lets it pass; a
        # wish that cannot come true is an error. Only here can the two be told apart.
        for one in declarations:
            if one.part_of and getattr(result, one.name) is True and not getattr(result, one.part_of):
                raise OptionError(
                    f"{one.name} is on, but {one.part_of} is off.",
                    why=f"{one.name} is part of {one.part_of} and does nothing without it.",
                    fix=f"Set {one.part_of}=True as well, or leave {one.name} out.",
                )
        return result

    def changed(self, other: Options) -> tuple[str, ...]:
        """Names of the options whose values differ, in the order of declaration."""
        return tuple(one.name for one in switches() if getattr(self, one.name) != getattr(other, one.name))

    def stage_of_change(self, other: Options, *, ignoring: Collection[str] = ()) -> Effect | None:
        """Earliest stage to redo to go from one record to the other; None if nothing has to be redone.

        An option that is part of one that is off does not act, and so does not count.

        Parameters
        ----------
        other
            The other record.
        ignoring
            Names of options that make no difference to the model at hand.
        """
        effects = [
            one.effect
            for one in switches()
            if self._acting(one) != other._acting(one) and one.name not in ignoring
        ]
        return min(effects, default=None)

    def acts(self, name: str) -> bool:
        """Tell whether a switch is on, and so is the one that it is part of."""
        return bool(self._acting(declaration(name)))

    def _acting(self, one: Switch) -> Value:
        """Return the value that a switch acts with: its own, or "off" if it is part of a switch that is off."""
        value: Value = getattr(self, one.name)
        return type(value)() if one.part_of and not getattr(self, one.part_of) else value

    def to_dict(self) -> dict[str, bool | int | str | list[str]]:
        """Every option as JSON can hold it."""
        values = {one.name: getattr(self, one.name) for one in switches()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Options:
        """Read what `to_dict` wrote; an option that is missing gets its default.

        Raises
        ------
        OptionError
            An option is unknown, a value has the wrong type, or two values contradict each other.
        """
        for name in values:
            declaration(name)
        return cls(**values)  # type: ignore[arg-type]


@functools.cache
def _defaults() -> Options:
    return Options()


def check_needs(options: Options, have: Collection[Need]) -> None:
    """Raise OptionError, with what to install, for options that somebody has switched on and that cannot act here."""
    # A default that cannot act (`embedding_sparse_optimizer` without a GPU) does no harm and passes. `have` is what
    # `ortlab.engine.installation.have()` returns.
    for name in options.changed(_defaults()):
        reason = unmet(name, have)
        if getattr(options, name) and reason:
            raise OptionError(f"{name} cannot act here.", why=reason, fix=f"Leave {name} at its default.")


def _check_operators(names: Collection[str]) -> None:
    """Refuse a misspelt ONNX operator; one that is like none of ONNX's may be ONNX Runtime's own."""
    from onnx.defs import get_all_schemas

    known = {schema.name for schema in get_all_schemas()}
    for name in names:
        meant = did_you_mean(name, known, cutoff=0.9)
        if name not in known and meant:
            raise OptionError(
                f"cast_allow cannot be {name!r}.",
                why="There is no such operator in ONNX.",
                fix=meant,
            )


def _check_recompute(words: Sequence[str]) -> None:
    """Refuse words that cannot stand together: those for all layers or all of a model, and layers named twice."""
    layers = {word: range_ for word in words if (range_ := read_layers(word)) is not None}
    whole = [
        word
        for word in words
        if word.startswith("all but ")
        or (word in layers and (layers[word].first, layers[word].end) == (0, None))
    ]
    if whole and len(words) > 1:
        raise OptionError(
            f"recompute cannot be {shown(list(words))}.",
            why=f"{whole[0]!r} stands for the whole model, and so by itself.",
            fix=f'Write recompute="{whole[0]}", or name modules only.',
        )
    if layers and len(layers) < len(words):
        raise OptionError(
            f"recompute cannot be {shown(list(words))}.",
            why="It names layers by number and modules by path, which may be the same.",
            fix="Keep one of the two.",
        )
    before = 0
    for word, range_ in sorted(layers.items(), key=lambda one: one[1].first):
        if range_.first < before or (range_.end is not None and range_.end <= range_.first):
            raise OptionError(
                f"recompute cannot be {shown(list(words))}.",
                why=f"{word!r} has no layers, or some that another one has.",
                fix='Count from 0, the end not included: ["layers[:4]", "layers[4:8] but linear"].',
            )
        before = LAST_LAYER if range_.end is None else range_.end


def setting_words(name: str, value: object) -> str:
    """Name a switch with its value, for titles and tables: "memory_level=1", "no recompute plans"; short."""
    if name == "memory_plan" and not value:
        return "no recompute plans"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if len(text) <= _VALUE_WIDTH:
        return f"{name}={text or 'none'}"
    if name == "memory_plan" and isinstance(value, tuple):
        return f"{len(value)} recompute plan{'s' * (len(value) > 1)}"
    return f"{name}={text[: _VALUE_WIDTH - 1]}…"
