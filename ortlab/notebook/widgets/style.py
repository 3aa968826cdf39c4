"""How the panel looks: one style sheet, in the notebook theme's own colours."""

from __future__ import annotations

from typing import Final

from ortlab.notebook.widgets.record_table import RULES
from ortlab.notebook.widgets.static_files import compacted_style
from ortlab.render import html

PANEL: Final = "ortlab-panel"
"""Class of the panel's outermost element; every rule below stands under it."""

_RULES = """\
.ortlab-panel { border: 1px solid var(--jp-border-color1, #bdbdbd); border-radius: 6px; padding: 12px 16px;
  max-width: 1040px; box-sizing: border-box; overflow: visible; position: relative; }
.ortlab-panel.ortlab-waits::after { content: "Waiting for the kernel"; position: absolute; z-index: 3;
  top: 0; left: 0; right: 0; padding: 0 16px; border-top: 3px solid var(--jp-brand-color1, #1976d2);
  border-radius: 6px 6px 0 0; font-size: 10px; line-height: 1.2; text-align: right; color: transparent;
  pointer-events: none; animation: ortlab-late 0s .6s forwards; }
@keyframes ortlab-late { to { color: var(--jp-ui-font-color1, inherit); } }
.ortlab-panel .widget-html-content { line-height: 1.45; font-size: 13px; }
.ortlab-panel .widget-html, .ortlab-panel .widget-html-content { min-width: 0; max-width: 100%; }
.ortlab-panel > .widget-html > .widget-html-content { width: 100%; }
.ortlab-panel .jupyter-widgets { margin-left: 0; margin-right: 0; }
.ortlab-panel.ortlab-panel.ortlab-panel :focus-visible {
  outline: 2px solid var(--jp-brand-color1, #1976d2) !important; outline-offset: 1px; }
.ortlab-panel .ortlab-header { font-size: 15px; display: flex; flex-flow: row wrap; gap: 2px 10px;
  align-items: baseline; }
.ortlab-panel .ortlab-state { font-size: 13px; }
.ortlab-panel .ortlab-header code { font-size: 14px; font-weight: 600; background: none; padding: 0; color: inherit; }
.ortlab-panel .ortlab-badge { display: inline-block; border: 1px solid currentColor; border-radius: 10px;
  padding: 0 10px; font-size: 12px; font-weight: 700; letter-spacing: .02em; }
.ortlab-panel h5 { font-size: 13px; font-weight: 600; margin: 10px 0 2px; }
.ortlab-panel .ortlab-row { flex-flow: row wrap; gap: 8px; align-items: center; margin: 8px 0 4px; overflow: visible; }
.ortlab-panel .ortlab-row .widget-html { flex: 1 1 160px; }
.ortlab-panel .ortlab-row .jupyter-button, .ortlab-panel .widget-toggle-buttons .jupyter-button {
  width: auto; min-width: 96px; padding: 0 14px; }
.ortlab-panel .widget-toggle-buttons { height: auto; width: auto; max-width: 100%; flex-flow: row wrap;
  align-items: center; margin: 6px 0; }
.ortlab-panel .widget-toggle-buttons > .widget-label { width: 66px; text-align: left; font-weight: 600; }
.ortlab-panel .widget-toggle-buttons .jupyter-button { margin: 0 4px 0 0; border: 1px solid transparent;
  max-width: 100%; min-width: min(96px, 100%); box-sizing: border-box; }
.ortlab-panel .widget-toggle-buttons .jupyter-button.mod-active { box-shadow: none; background: none;
  color: inherit; border-color: var(--jp-brand-color1, #1976d2); font-weight: 600; }
.ortlab-panel .ortlab-switch { flex-flow: row wrap; align-items: flex-start; gap: 2px 20px; padding: 7px 0 7px 10px;
  border-top: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .35)); overflow: visible; }
.ortlab-panel .ortlab-switch > :first-child { flex: 0 0 270px; max-width: 100%; height: auto; overflow: visible; }
.ortlab-panel .ortlab-switch > :last-child { flex: 1 1 340px; margin: 3px 0 0;
  min-width: min(220px, 100%); overflow: visible; }
.ortlab-panel .ortlab-switch .widget-text, .ortlab-panel .ortlab-switch .widget-dropdown,
.ortlab-panel .ortlab-switch .widget-select-multiple {
  flex-flow: column nowrap; align-items: stretch; height: auto; }
.ortlab-panel .ortlab-switch select, .ortlab-panel .ortlab-switch input:not([type=checkbox]) { flex: 0 0 auto; }
.ortlab-panel .ortlab-switch select:not([multiple]) { height: 28px; }
.ortlab-panel .ortlab-switch .widget-label, .ortlab-panel .ortlab-switch .widget-label-basic {
  font-family: var(--jp-code-font-family, monospace); font-size: 12px; width: auto; text-align: left; }
.ortlab-panel .ortlab-switch .widget-label-basic { overflow: visible; }
.ortlab-panel .ortlab-changed .widget-label, .ortlab-panel .ortlab-changed .widget-label-basic { font-weight: 700; }
.ortlab-panel .ortlab-changed { box-shadow: inset 3px 0 0 var(--jp-brand-color1, #1976d2); }
.ortlab-panel .ortlab-off .widget-label, .ortlab-panel .ortlab-off .widget-label-basic {
  color: var(--jp-ui-font-color2, #767676); }
.ortlab-panel .ortlab-help { font-size: 12px; line-height: 1.45; color: var(--jp-ui-font-color1, inherit); }
.ortlab-panel .ortlab-help code { font-size: 11px; padding: 0 2px; }
.ortlab-panel .ortlab-off .ortlab-help { color: var(--jp-ui-font-color2, #767676); }
.ortlab-panel .ortlab-chip { border: 1px solid var(--jp-border-color1, #bdbdbd);
  border-radius: 8px; padding: 0 7px; font-size: 11px; margin-right: 6px; color: var(--jp-ui-font-color1, inherit); }
.ortlab-panel .ortlab-filters .widget-dropdown, .ortlab-panel .ortlab-filters .widget-text { width: auto;
  flex: 0 1 190px; }
.ortlab-panel .ortlab-filters .widget-label { width: auto; margin-right: 6px; }
.ortlab-panel details { margin: 2px 0; }
.ortlab-panel .ortlab-report { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24em;
  overflow: auto; font-size: 12px; line-height: 1.4; }
.ortlab-panel .ortlab-messages details > .ortlab-scroll { max-height: 420px; overflow: auto; }
.ortlab-panel summary { cursor: pointer; }
.ortlab-panel .ortlab-error > .widget-html { flex: 1 1 auto; width: auto; }
.ortlab-panel .ortlab-error { border-left: 4px solid var(--jp-error-color1, #d32f2f); padding: 6px 12px;
  align-items: flex-start; overflow: visible; }
.ortlab-panel .ortlab-error p { margin: 0 0 4px; }
.ortlab-panel .ortlab-error .jupyter-button { width: auto; }
.ortlab-panel .ortlab p { overflow-wrap: anywhere; }
.ortlab-panel { min-width: 0; }
.ortlab-panel > *, .ortlab-panel .widget-vbox { min-width: 0; max-width: 100%; }
.ortlab-panel .ortlab-lost { display: none; margin: 0 0 8px; padding: 8px 12px; font-size: 13px; font-weight: 600;
  border-left: 4px solid var(--jp-error-color1, #d32f2f); color: var(--jp-ui-font-color1, inherit); }
.ortlab-panel .ortlab-lost:not(:empty) { display: block; }
.ortlab-panel.jupyter-widgets-disconnected::before,
.ortlab-panel .jupyter-widgets-disconnected::before { display: none; }
.ortlab-panel.jupyter-widgets-disconnected > [inert] { opacity: .55; }
.ortlab-panel .ortlab-row > .widget-toggle-buttons { flex: 1 1 auto; margin: 0; }
.ortlab-panel .ortlab-row > .jupyter-button:disabled { opacity: .45; }
.ortlab-panel .ortlab-fold { overflow: visible; border-top: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .35));
  margin-top: 8px; }
.ortlab-panel .ortlab-fold > button { align-self: flex-start; width: auto; height: auto; padding: 6px 8px 6px 0;
  font-weight: 600; line-height: 1.4; text-align: left; background: none; box-shadow: none; border: 0;
  color: var(--jp-ui-font-color1, inherit); max-width: 100%; white-space: normal; }
.ortlab-panel .ortlab-fold > button::before { content: "\\25B8";
  content: "\\25B8" / ""; display: inline-block; width: 1.2em; }
.ortlab-panel .ortlab-fold > button.mod-active::before { content: "\\25BE"; content: "\\25BE" / ""; }
.ortlab-panel .ortlab-fold > button:hover { text-decoration: underline; }
.ortlab-panel .ortlab-fold > button:not(.mod-active) + * { display: none; }
.ortlab-panel .ortlab-actions { position: relative; overflow: visible; }
.ortlab-panel .ortlab-progress { position: absolute; top: 100%; right: 0; z-index: 2; max-width: 80%; height: auto;
  align-items: center; gap: 8px; overflow: visible; background: var(--jp-layout-color0, Canvas); }
.ortlab-panel .ortlab-progress .widget-hprogress { min-width: 60px; flex: 0 1 200px; }
.ortlab-panel .ortlab-runs table.ortlab-table tbody th,
.ortlab.ortlab-records.ortlab-records table.ortlab-table tbody th { min-width: 14em; overflow-wrap: break-word; }
.ortlab-panel .ortlab-runs.ortlab-runs table.ortlab-table th,
.ortlab-panel .ortlab-runs.ortlab-runs table.ortlab-table td {
  padding-right: 8px; }
.ortlab-panel .ortlab-runs.ortlab-runs table.ortlab-table thead .ortlab-number { min-width: 4.5em; }
.ortlab-panel .ortlab-runs .ortlab-records .ortlab-scroll { max-height: 330px; }
.ortlab-ranks .ortlab.ortlab-records.ortlab-records table.ortlab-table tbody th { min-width: 3em; }
.ortlab-ranks .ortlab.ortlab-records.ortlab-records table.ortlab-table tr > :first-child { position: sticky; left: 0;
  background: var(--jp-layout-color0, Canvas); }
.ortlab-ranks .ortlab.ortlab-records.ortlab-records table.ortlab-table thead tr > :first-child { z-index: 2; }
.ortlab-ranks .ortlab.ortlab-records.ortlab-records table.ortlab-table td { white-space: nowrap; }
.ortlab-ranks .ortlab.ortlab-records.ortlab-records table.ortlab-table thead .ortlab-number { min-width: 4.5em; }
.ortlab-panel .ortlab-save { display: flex; justify-content: flex-start; }
.ortlab-panel .ortlab-save button { width: auto; padding: 0 12px; margin: 0; font-size: 12px; }
.ortlab-panel.ortlab-narrow { padding: 10px; }
.ortlab-panel.ortlab-narrow .ortlab-switch > :first-child { flex-basis: 100%; }
.ortlab-panel.ortlab-narrow .ortlab-switch > :last-child { flex-basis: 100%; padding-left: 24px; }
.ortlab-panel.ortlab-narrow .ortlab-row .jupyter-button { flex: 1 1 auto; min-width: 0; }
.ortlab-panel.ortlab-narrow .widget-toggle-buttons > .widget-label { width: 100%; }
.ortlab-panel.ortlab-narrow .ortlab-records .ortlab-tools input[type=search] { width: 10em; }
.ortlab-panel.ortlab-narrow .ortlab-filters > * { flex: 1 1 100%; }
"""

SHEET: Final = compacted_style(html.STYLE + _RULES + RULES)
"""Style sheet of a panel and of all that stands in it."""
