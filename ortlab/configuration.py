"""A configuration: who executes the model, and with which switches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ortlab.engine_names import check_engine
from ortlab.option_files import with_files
from ortlab.options import Need, Options, check_needs


@dataclass(frozen=True)
class Configuration:
    """An engine and the switches; a change makes a new record.

    Attributes
    ----------
    engine
        "ort", "eager", "checkpoint" or "compile", with what it is told: see `ortlab.engine_names.check_engine`.
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
