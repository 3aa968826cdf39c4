"""The panel's controls: one row per switch, made from its declaration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from ipywidgets.widgets.widget_bool import CheckboxStyle
from ipywidgets.widgets.widget_description import DescriptionStyle
from ipywidgets.widgets.widget_string import TextStyle

from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.controls import Looks, close_tree, prose
from ortlab.options.options import Group, Need, Options, Switch, switches, unmet
from ortlab.options.switches import Value
from ortlab.render.lab_pages import value_text

if TYPE_CHECKING:
    import ipywidgets as widgets

Change = Callable[[str, Value], None]
"""Called with a switch's name and the value that the user chose."""

Cost = Callable[[str], str]
"""Called with a switch's name; says what a change of it takes now."""

_DEFAULTS: Final = Options()
_RESET: Final = "Set every switch to its default"


class SwitchRow(controls.Box):
    """One switch in a line: its control, what a change takes, why it cannot act, and its help folded away."""

    # The row itself changes nothing: it tells `on_change` what the user chose. `variable` is the environment variable
    # that gave the switch its first value, or "".

    def __init__(
        self,
        switch: Switch,
        have: Collection[Need],
        on_change: Change,
        cost: Cost,
        looks: Looks,
        variable: str = "",
    ) -> None:
        self.switch = switch
        self._cost = cost
        self._variable = variable
        self.control = _control(switch, looks)
        self._missing = unmet(switch.name, have)
        self._help = looks.html()
        self._on_change = on_change
        self._showing = False
        self._said = ""
        super().__init__([self.control, self._help], layout=looks.layout)
        self.add_class("ortlab-switch")
        self.control.observe(self._changed, "value")

    @property
    def reason(self) -> str:
        """Why the control is greyed out; empty if it is not."""
        return self._reason

    def say(self, words: str) -> None:
        """Say beside the control what the last choice has led to, until the next one; empty words take that back."""
        if words != self._said:
            self._said = words
            self._help.value = self._explain(changed="ortlab-changed" in self._dom_classes)

    def show(self, options: Options) -> None:
        """Show the value that `options` have, without sending it back."""
        value = getattr(options, self.switch.name)
        parent = self.switch.part_of
        self._reason = self._missing
        if not self._reason and parent and not getattr(options, parent):
            self._reason = f"Acts only while `{parent}` is on."
        self._showing = True
        try:
            self.control.value = _shown(self.switch, value)
        finally:
            self._showing = False
        changed = value != getattr(_DEFAULTS, self.switch.name)
        self.control.disabled = bool(self._reason)
        for name, applies in (("ortlab-changed", changed), ("ortlab-off", bool(self._reason))):
            (self.add_class if applies else self.remove_class)(name)
        self._help.value = self._explain(changed=changed)

    def _explain(self, *, changed: bool) -> str:
        parts = []
        if self._said:
            parts.append(f'<strong class="ortlab-said" role="status">{prose(self._said)}</strong><br>')
        if not self._reason and (cost := self._cost(self.switch.name)):
            parts.append(f'<span class="ortlab-chip">{prose(cost)}</span>')
        default = value_text(getattr(_DEFAULTS, self.switch.name))
        if changed:
            parts.append(f"<strong>changed</strong>, default {prose(default)}")
        if self._variable:
            parts.append(f"First value from the variable {prose(f'`{self._variable}`')}.")
        if self._reason:
            parts.append(f"<em>{prose(self._reason)}</em>")
        parts.append(f"<details><summary>What it does</summary>{prose(self.switch.help)}</details>")
        return f'<div class="ortlab-help">{" ".join(parts)}</div>'

    def _changed(self, change: Any) -> None:
        if not self._showing:
            self._on_change(self.switch.name, change["new"])


class SwitchList(controls.Column):
    """The switches of one group at a time, chosen by buttons; the rows of a group that is left are closed."""

    # A saved notebook holds all rows that there are: those of all groups would be most of it.

    def __init__(
        self,
        have: Collection[Need],
        on_change: Change,
        cost: Cost,
        variables: Mapping[str, str],
        looks: Looks,
    ) -> None:
        self._have = have
        self._on_change = on_change
        self._cost = cost
        self._variables = variables
        self._looks = looks
        self._options = _DEFAULTS
        self._rows: tuple[SwitchRow, ...] = ()
        self._shown: Group | None = None
        self.groups = controls.ToggleButtons(
            options=[(group.value.capitalize(), group) for group in Group],
            value=Group.COMPUTE,
            description="Switches",
            layout=looks.layout,
        )
        # Whoever makes the list says what a click does.
        self.reset = looks.button("All to defaults", _RESET)
        self._differing = looks.html()
        self._body = controls.Column(layout=looks.layout)
        super().__init__(
            [self._differing, looks.row(self.groups, self.reset), self._body], layout=looks.layout
        )
        self.groups.observe(self._show_group, "value")

    def row(self, name: str) -> SwitchRow:
        """Show the group of a switch, and return its row."""
        self.groups.value = next(one.group for one in switches() if one.name == name)
        return next(row for row in self._rows if row.switch.name == name)

    def say(self, name: str, words: str) -> None:
        """Say beside one switch what its last choice has led to, and remove what stood beside others."""
        for row in self._rows:
            row.say(words if row.switch.name == name else "")

    def show(self, options: Options) -> None:
        """Show the values that `options` have."""
        self._options = options
        changed = options.changed(_DEFAULTS)
        self.reset.disabled = not changed
        self.reset.tooltip = _RESET if changed else "Every switch is at its default."
        self._differing.value = _differing(options)
        counts = {
            group: sum(one.group is group and one.name in changed for one in switches()) for group in Group
        }
        labels = tuple((_group_label(group, counts[group]), group) for group in Group)
        if tuple(self.groups.options) != labels:
            self.groups.rename(labels)
        for row in self._rows:
            row.show(options)
        self._show_group()

    def _show_group(self, _change: Any = None) -> None:
        if self._shown is self.groups.value:
            return
        before, self._shown = self._rows, self.groups.value
        self._rows = tuple(self._row_of(one) for one in switches() if one.group is self._shown)
        self._body.children = self._rows
        for row in before:
            close_tree(row, self._looks)

    def _row_of(self, switch: Switch) -> SwitchRow:
        variable = self._variables.get(switch.name, "")
        row = SwitchRow(switch, self._have, self._on_change, self._cost, self._looks, variable)
        row.show(self._options)
        return row


def _differing(options: Options) -> str:
    """Say which switches differ from their defaults, and what those are."""
    words = [
        f"<code>{name}</code> {prose(value_text(getattr(options, name)))} (default {prose(value_text(default))})"
        for name, default in ((name, getattr(_DEFAULTS, name)) for name in options.changed(_DEFAULTS))
    ]
    said = (
        f"<strong>Differs from the defaults:</strong> {', '.join(words)}"
        if words
        else "All switches are at their defaults."
    )
    return f'<div class="ortlab ortlab-differing">{said}</div>'


def _group_label(group: Group, changed: int) -> str:
    """Name a group, and how many of its switches differ from their defaults."""
    return group.value.capitalize() + (f" ({changed} changed)" if changed else "")


def _control(switch: Switch, looks: Looks) -> widgets.ValueWidget:
    named: dict[str, Any] = {"description": switch.name, "layout": looks.layout}
    if switch.type is bool:
        return controls.Checkbox(indent=False, style=looks.style(CheckboxStyle), **named)
    named["style"] = looks.style(TextStyle if _is_typed(switch) else DescriptionStyle)
    if switch.choices:
        kind = controls.SelectMultiple if switch.type is tuple else controls.Dropdown
        control = kind(options=[(value_text(choice), choice) for choice in switch.choices], **named)
        if switch.type is tuple:
            control.rows = len(switch.choices)
        return control
    if switch.type is int:
        return controls.IntText(continuous_update=False, **named)
    hint = "none; separate several by commas" if switch.type is tuple else "none"
    return controls.Text(continuous_update=False, placeholder=hint, **named)


def _is_typed(switch: Switch) -> bool:
    return not switch.choices and switch.type is not int


def _shown(switch: Switch, value: Value) -> Value:
    """Turn a switch's value into what its control takes: a free list is typed as text with commas."""
    return ", ".join(value) if isinstance(value, tuple) and not switch.choices else value
