"""How the panel looks: one style sheet, in the notebook theme's own colours."""

from __future__ import annotations

from typing import Final

from ortlab.render import html

PANEL: Final = "ortlab-panel"
"""Class of the panel's outermost element; every rule below stands under it."""

_RULES = """\
.ortlab-panel { border: 1px solid var(--jp-border-color1, #bdbdbd); border-radius: 6px; padding: 12px 16px;
  max-width: 1040px; box-sizing: border-box; overflow: visible; }
.ortlab-panel .widget-html-content { line-height: 1.45; font-size: 13px; }
.ortlab-panel .widget-html, .ortlab-panel .widget-html-content { min-width: 0; max-width: 100%; }
.ortlab-panel > .widget-html > .widget-html-content { width: 100%; }
.ortlab-panel .jupyter-widgets { margin-left: 0; margin-right: 0; }
.ortlab-panel :focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px; }
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
.ortlab-panel .widget-toggle-buttons .jupyter-button { margin: 0 4px 0 0; border: 1px solid transparent; }
.ortlab-panel .widget-toggle-buttons .jupyter-button.mod-active { box-shadow: none; background: none;
  color: inherit; border-color: var(--jp-brand-color1, #1976d2); font-weight: 600; }
.ortlab-panel .ortlab-switch { flex-flow: row wrap; align-items: flex-start; gap: 2px 20px; padding: 7px 0 7px 10px;
  border-top: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .35)); overflow: visible; }
.ortlab-panel .ortlab-switch > :first-child { flex: 0 0 270px; max-width: 100%; height: auto; overflow: visible; }
.ortlab-panel .ortlab-switch > :last-child { flex: 1 1 340px; margin: 3px 0 0; min-width: 220px; overflow: visible; }
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
.ortlab-panel .ortlab-chip { white-space: nowrap; border: 1px solid var(--jp-border-color1, #bdbdbd);
  border-radius: 8px; padding: 0 7px; font-size: 11px; margin-right: 6px; color: var(--jp-ui-font-color1, inherit); }
.ortlab-panel .ortlab-error { border-left: 4px solid var(--jp-error-color1, #d32f2f); padding: 6px 12px;
  align-items: flex-start; overflow: visible; }
.ortlab-panel .ortlab-error p { margin: 0 0 4px; }
.ortlab-panel .ortlab-error .jupyter-button { width: auto; }
.ortlab-panel .ortlab-plan { align-items: center; gap: 2px 16px; flex-flow: row wrap; padding: 3px 0; height: auto;
  border-top: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .35)); overflow: visible; }
.ortlab-panel .ortlab-plan .widget-checkbox { flex: 0 0 330px; max-width: 100%; height: auto; }
.ortlab-panel .ortlab-plan .widget-label-basic { font-family: var(--jp-code-font-family, monospace); font-size: 12px;
  white-space: normal; overflow-wrap: anywhere; line-height: 1.3; display: flex; align-items: center; gap: 8px; }
.ortlab-panel .ortlab-plan input { flex: 0 0 auto; }
.ortlab-panel .ortlab-plan .widget-html { flex: 1 1 340px; margin: 0; }
.ortlab-panel .ortlab-plan .ortlab-help { display: flex; align-items: baseline; }
.ortlab-panel .ortlab-saving { flex: 0 0 84px;
  font-variant-numeric: tabular-nums; font-weight: 600; }
"""

SHEET: Final = f"<style>\n{html.STYLE}{_RULES}</style>"
"""The style element that the panel carries with it."""
