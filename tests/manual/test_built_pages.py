"""The manual as a reader opens it: it is built without a warning, and read in Chromium in both themes."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser.server import CHROMIUM_FLAGS, RULES, chromium_executable
from playwright.sync_api import sync_playwright

from ortlab.render import html

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]  # beside others on a busy machine

DOCS = Path(__file__).parents[2] / "docs"

PAGES = (
    "index",
    "panel",
    "options",
    "memory",
    "measurement",
    "magics",
    "troubleshooting",
    "compatibility",
    "_generated/01_quickstart",
    "_generated/05_graphs",
)
"""Of each kind some: the first page, how-tos, concepts, tables, what docstrings make, notebooks with their outputs."""


@pytest.fixture(scope="module")
def built() -> Path:
    """Build the manual as `run-tests docs` leaves it."""
    folder = DOCS / "_build" / "html"
    options = ("-q", "-W", "--keep-going", "-b", "html")
    sphinx = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder)]
    done = subprocess.run(sphinx, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Read(HTMLParser):
    """What links lead to a page and from it, and the words between its head and its foot."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.words = 0
        self._inside: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}
        self.targets += [given[key] for key in ("href", "src") if given.get(key)]
        if tag in {"article", "script", "style"}:
            self._inside.append(tag)

    def handle_endtag(self, tag):
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data):
        if self._inside == ["article"]:
            self.words += len(data.split())


@pytest.fixture(scope="module")
def read(built) -> dict[Path, Read]:
    return {page: Read(page) for page in built.rglob("*.html")}


def test_every_link_of_the_built_manual_leads_to_a_page_and_a_place_on_it(built, read):
    checked, broken = 0, set()
    for page, found in read.items():
        for target in found.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:  # elsewhere, or a picture in the page itself
                continue
            checked += 1
            aim = (page.parent / unquote(address.path)).resolve() if address.path else page
            anchor = unquote(address.fragment)
            if not aim.is_file() or (anchor and aim in read and anchor not in read[aim].names):
                broken.add(f"{page.relative_to(built)}: {target}")
    print(f"{checked:,} links checked on {len(read):,} pages")
    assert sorted(broken) == []
    assert checked > 10_000


def test_no_page_is_a_book(built, read):
    words = {
        str(page.relative_to(built)): found.words
        for page, found in read.items()
        if "_modules" not in page.parts
    }
    longest = max(words, key=words.__getitem__)
    print(f"{len(words):,} pages, the longest {longest} with {words[longest]:,} words")
    assert words[longest] < 8_000
    assert words["index.html"] > 300  # words are counted


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_executable(), args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


def violations(page) -> list[tuple[str, str, str]]:
    return [
        (rule["id"], node["html"], node["failureSummary"])
        for rule in Axe().run(page, options=RULES).response["violations"]
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ten_pages_pass_axe_core(built, chromium, theme):
    context = chromium.new_context(viewport={"width": 1280, "height": 1000}, color_scheme=theme)
    context.set_default_timeout(120_000)
    page = context.new_page()
    found = {}
    for name in PAGES:
        page.goto((built / f"{name}.html").as_uri())
        found[name] = violations(page)
    assert {name: what for name, what in found.items() if what} == {}
    page.add_style_tag(content="article p { color: rgb(128 128 128 / 50%) !important }")  # a fault
    assert {rule for rule, *_ in violations(page)} == {"color-contrast"}
    context.close()


GROUNDS = {"light": ("#ffffff", "#1f1f1f"), "dark": ("#1e1e1e", "#d4d4d4")}
"""A page's ground and its text, as notebooks outside JupyterLab have them."""


@pytest.mark.parametrize("theme", GROUNDS)
def test_the_colours_of_a_record_are_legible_where_jupyterlabs_are_absent(chromium, theme):
    ground, text = GROUNDS[theme]
    words = "".join(f'<p class="ortlab-{mark}">{mark}</p>' for mark in ("good", "warn", "bad", "quiet"))
    code = html.highlighted("@one\ndef two(x: int) -> str:  # three\n    return 'four' + str(x * 5)\n")
    body = f'<main><h1>A record</h1><div class="ortlab">{words}{code}</div></main>'
    page = chromium.new_page()
    page.set_content(
        f"<html lang='en'><title>A record</title><style>body {{ background: {ground}; color: {text} }}{html.STYLE}"
        f"{html.CODE_STYLE}</style><body>{body}</body></html>"
    )
    assert violations(page) == []
    page.add_style_tag(content=".ortlab .ortlab-good { color: rgb(128 128 128 / 60%) }")  # a fault
    assert {rule for rule, *_ in violations(page)} == {"color-contrast"}
    page.close()
