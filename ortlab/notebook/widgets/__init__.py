"""The panel in ipywidgets: it holds records, shows them, and sends intents to the lab; it computes nothing."""

from __future__ import annotations
