"""A configuration: who executes the model, and with which switches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ortlab.options.engine_names import check_engine
from ortlab.options.option_files import with_files
from ortlab.options.options import Need, Options, check_needs


@dataclass(frozen=True)
class Configuration:
    """An engine and the switches; a change makes a new record.

    Attributes
    ----------
    engine
        "ort", "eager", "checkpoint" or "compile", with what it is told: see `ortlab.options.engine_names.check_engine`.
    options
        The switches.
    """

    engine: str
    options: Options

    def changed(self, changes: Mapping[str, object], have: Collection[Need]) -> Configuration:
        """Return the configuration after some changes, if it can act in this process.

        Parameters
        ----------
        changes
            Options by name; "engine" may be among them.
        have
            What is present: `ortlab.engine.installation.have()`.

        Raises
        ------
        OptionError
            If an option or the engine is unknown, has a wrong value, contradicts another, or cannot act here.
        """
        wished = dict(changes)
        engine = check_engine(wished.pop("engine", self.engine))
        options = self.options.replace(**wished)
        options = with_files(options, changes)
        check_needs(options, have)
        return Configuration(engine, options)

    def tried(self, changes: Mapping[str, object], have: Collection[Need]) -> Configuration:
        """Return the configuration after changes that are for one call.

        A memory level and a list of plans are two ways to choose plans, so the one that is named takes the place of the
        other that the lab has. For changes that stay, `changed` refuses that, as it would undo a choice unasked.

        Parameters
        ----------
        changes, have
            As for `changed`.

        Raises
        ------
        OptionError
            As for `changed`.
        """
        wished = dict(changes)
        if "memory_plan" not in wished and _is_level(wished.get("memory_level")):
            wished["memory_plan"] = ()
        elif "memory_level" not in wished and wished.get("memory_plan"):
            wished["memory_level"] = 0
        return self.changed(wished, have)


def _is_level(value: object) -> bool:
    """Say whether a level, as text or a number, is one that chooses plans."""
    return value is not None and str(value).strip() not in {"0", ""}
