"""Every record with a page, small and large: as repr, as text, as HTML, and as IPython shows it."""

from __future__ import annotations

import base64
import importlib
import pkgutil
import re
import xml.etree.ElementTree as ET

import pytest
from IPython.core.formatters import DisplayFormatter
from session_records import deep_lab, net_lab, session_records

import ortlab
from ortlab.lab.lab import Lab
from ortlab.render import headlines, pages
from ortlab.shown import REPR_LENGTH, Shown, ShownAsPanel

# A cluster of more ranks than cores.
pytestmark = pytest.mark.filterwarnings("ignore:.*ranks share")

IMAGE = re.compile(r'src="data:image/svg\+xml;base64,([^"]*)"')


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        lab, deep = net_lab(), deep_lab()
        yield session_records(lab, deep, tmp_path_factory.mktemp("records"), monkeypatch)
    lab.unwrap()
    deep.unwrap()


def kinds() -> list[type]:
    """Every class that shows itself, found in all modules of the package."""
    for module in pkgutil.walk_packages(ortlab.__path__, "ortlab."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = [], [Shown]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found += [one for one in below if one is not ShownAsPanel and one.__module__.startswith("ortlab.")]
    return found


def test_every_record_has_a_page_and_a_headline_and_is_walked_over(records):
    found = set(kinds())
    assert found == {*pages.record_types(), Lab}
    assert {kind for kind in headlines.headline.registry if kind is not object} == found - {Lab}
    assert set(records) == found


def test_a_repr_is_one_short_line(records):
    for kind, both in records.items():
        for record in both:
            line = repr(record)
            assert line.startswith(f"{kind.__name__}("), line
            assert line.endswith(")"), line
            assert len(line) <= REPR_LENGTH, line
            assert line.isprintable(), line


@pytest.fixture(scope="module")
def forms(records):
    """Return what a front end is sent of each record, where nobody has loaded the extension."""
    formatter = DisplayFormatter()
    return {kind: [formatter.format(record)[0] for record in both] for kind, both in records.items()}


def test_every_record_shows_its_page_with_and_without_the_extension(records, forms, bare_shell):
    bare_shell.run("%load_ext ortlab")
    try:
        for kind, both in records.items():
            for record, without in zip(both, forms[kind], strict=True):
                assert set(without) == {"text/plain", "text/html"}, kind
                assert without["text/plain"] == str(record)
                assert bare_shell.formats(record) == without, kind
    finally:
        bare_shell.run("%unload_ext ortlab")


def test_figures_are_images_that_any_viewer_can_read(forms):
    drawn = set()
    for kind, both in forms.items():
        for shown in both:
            written = shown["text/html"]
            assert "<svg" not in written, kind  # an untrusted notebook would lose it
            assert "currentColor" not in written
            for carried in IMAGE.findall(written):
                root = ET.fromstring(base64.b64decode(carried))  # noqa: S314 - our own picture
                assert root.tag == "{http://www.w3.org/2000/svg}svg"
                drawn.add(kind.__name__)
    assert {
        "Sweep",
        "EngineComparison",
        "SavedActivations",
        "Graph",
        "GraphDiff",
        "Parity",
        "DensityReport",
    } <= drawn


def test_a_large_record_stays_small_in_a_notebook(forms):
    for kind, (_, large) in forms.items():
        assert sum(map(len, large.values())) < 600_000, kind


def test_a_record_inside_a_list_is_its_repr(records, bare_shell):
    for both in records.values():
        for record in both:
            forms = bare_shell.formats([record])
            assert forms == {"text/plain": f"[{record!r}]"}


def test_a_terminal_draws_nothing(records, bare_shell):
    bare_shell.display_formatter.active_types = ["text/plain"]
    for small, large in records.values():
        for record in (small, large):
            assert set(bare_shell.formats(record)) == {"text/plain"}
