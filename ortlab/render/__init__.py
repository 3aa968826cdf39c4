"""Records to text, HTML and figures; nothing here computes what a record does not hold."""

from __future__ import annotations
