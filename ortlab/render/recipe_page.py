"""The page of a recipe: its code, and what is missing here to run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.render.page import Folded, Mark, Note, Page

if TYPE_CHECKING:
    from ortlab.records.recipe import Recipe


def recipe_page(recipe: Recipe) -> Page:
    """Show the code, and say what it needs that is not here."""
    lacking = tuple(Note(sentence, Mark.WARN) for sentence in recipe.missing)
    return Page(f"Recipe: {recipe.title}", (*lacking, Folded("Code", recipe.code, is_open=True)))
