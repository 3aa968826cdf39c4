"""The page that draws graphs, assembled once for each netron from the modules of the installed package.

Nothing of netron is copied into ortlab. Its ES modules are read where pip has put them, the few that draw ONNX are
wrapped as functions, and one script is made of them that a page without a network can carry. What netron's own page
does besides - the lock of versions older than 180 days, the question about cookies, the telemetry - stands in its
`browser.js`, which is left out; `static/host.js` takes its place.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import platformdirs
from filelock import FileLock, Timeout

from ortlab.errors import InstallError

STATIC: Final = Path(__file__).parent / "static"
"""Folder of our own part of the page."""

NETRON_MODULES: Final = (
    "base",
    "text",
    "protobuf",
    "flatbuffers",
    "zip",
    "onnx-proto",
    "onnx",
    "dagre",
    "grapher",
    "view",
)
"""The modules of netron that draw an ONNX file; each stands after those that it imports."""

OWN_MODULES: Final = ("host", "page")

NOTICE: Final = """Contains Netron {version}, https://github.com/lutzroeder/netron

MIT License

Copyright (c) Lutz Roeder

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""
"""Netron's licence, which goes with every page."""

_BAR: Final = """
<div id="ortlab-bar" role="search">
<input id="ortlab-search" type="search" placeholder="Search nodes" aria-label="Search nodes" autocomplete="off">
<span id="ortlab-count" role="status"></span>
<div id="ortlab-found" aria-label="Nodes found" hidden></div>
</div>
<div id="ortlab-status" role="status"></div>
<div id="ortlab-notice" role="alert" hidden><span id="ortlab-notice-text"></span>
<button id="ortlab-notice-button" type="button"></button></div>
"""

_IMPORT: Final = re.compile(r"^import \* as (\w+) from '(\./[\w-]+\.js)';$", re.MULTILINE)
_EXPORT_NAMES: Final = re.compile(r"^export const \{ ([\w, ]+) \} = (\w+);$", re.MULTILINE)
_EXPORT_CONST: Final = re.compile(r"^export const (\w+) = ", re.MULTILINE)
_EXPORT_DECLARED: Final = re.compile(r"^export ((?:async )?(?:class|function) (\w+))", re.MULTILINE)
_DYNAMIC: Final = re.compile(r"(?<![.\w])import\((?=['`])")
_LEFT: Final = re.compile(r"^(?:import|export)\b.*$|\bimport\.meta\b", re.MULTILINE)
_DARK: Final = "@media (prefers-color-scheme: dark) {"
_PATIENCE_S: Final = 20


@dataclass(frozen=True)
class Bundle:
    """What every page carries."""

    version: str  # of netron
    packed: str  # the script, the styles and the markup: JSON, compressed with gzip, in base64
    script_hash: str  # SHA-256 of the script in base64, as a content security policy names it


@lru_cache(maxsize=8)
def bundle(folder: Path | None = None) -> Bundle:
    """Return the page for a netron package, from the user's cache if it has been assembled before."""
    package = folder or _installed()
    version = _version(package)
    kept = (
        platformdirs.user_cache_path("ortlab") / "viewer" / f"netron-{version}-{_fingerprint(package)}.json"
    )
    known = _read(kept)
    if known is not None:
        return known
    made = assemble(package, version)
    # The cache saves a second, no more: a folder that cannot be written is no reason to show nothing.
    with contextlib.suppress(OSError, Timeout):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{kept}.lock", timeout=_PATIENCE_S):
            unfinished = kept.with_suffix(".part")
            unfinished.write_text(json.dumps(asdict(made)), encoding="utf-8")
            unfinished.replace(kept)
    return made


def assemble(package: Path, version: str) -> Bundle:
    """Make the page of a netron package."""
    try:
        sources = {name: _text(package / f"{name}.js") for name in NETRON_MODULES}
        index, styles = _text(package / "index.html"), _text(package / "grapher.css")
    except OSError as error:
        raise _unsupported(version, str(error)) from error
    sources |= {name: _text(STATIC / f"{name}.js") for name in OWN_MODULES}
    script = _script(
        {f"./{name}.js": _wrapped(name, source, version) for name, source in sources.items()}, version
    )
    inline = re.findall(r"<style>(.*?)</style>", index, re.DOTALL)
    light, dark = _themes("".join([styles, *inline, _text(STATIC / "page.css")]))
    body = re.search(r"<body[^>]*>(.*)</body>", index, re.DOTALL)
    if body is None:
        raise _unsupported(version, "index.html has no body.")
    page = {
        "version": version,
        "css": {"ortlab-light": light, "ortlab-dark": dark},
        "body": body[1] + _BAR,
        "script": script,
    }
    return Bundle(version, pack(json.dumps(page).encode(), 9), content_hash(script))


def pack(data: bytes, level: int = 6) -> str:
    """Compress with gzip and encode in base64; the same bytes give the same text on any day."""
    return base64.b64encode(gzip.compress(data, level, mtime=0)).decode()


def content_hash(script: str) -> str:
    """Return the hash by which a content security policy names an inline script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def operator_types(package: Path | None = None) -> list[dict[str, object]]:
    """Return what netron knows of each ONNX operator: category, attributes, inputs, outputs, description."""
    return _operator_types(package or _installed())


@lru_cache(maxsize=2)
def _operator_types(package: Path) -> list[dict[str, object]]:
    try:
        read = json.loads(_text(package / "onnx-metadata.json"))
    except (OSError, ValueError) as error:
        raise _unsupported(_version(package), str(error)) from error
    return [entry for entry in read if isinstance(entry, dict)]


def _script(modules: dict[str, str], version: str) -> str:
    entries = ",\n".join(f"{json.dumps(name)}: {code}" for name, code in modules.items())
    notice = NOTICE.format(version=version)
    return f"""/*!
{notice}
*/
(() => {{ 'use strict';
const __ortlab_modules = {{
{entries}
}};
const __loaded = {{}};
const __require = (name) => {{
    if (!__loaded[name]) {{
        if (!__ortlab_modules[name]) throw new Error(`The view does not carry the module ${{name}}.`);
        __ortlab_modules[name](__loaded[name] = {{}}, __require, async (name) => __require(name), __ortlab_modules);
    }}
    return __loaded[name];
}};
__require('./page.js');
}})();
"""


def _wrapped(name: str, source: str, version: str) -> str:
    """Make a function of an ES module: of its exports object, `require`, `import` and all modules."""
    source = _IMPORT.sub(r"const \1 = __require('\2');", source)
    source = _EXPORT_NAMES.sub(r"const { \1 } = \2; Object.assign(exports, { \1 });", source)
    source = _EXPORT_CONST.sub(r"const \1 = exports.\1 = ", source)
    declared = [found[2] for found in _EXPORT_DECLARED.finditer(source)]
    source = _EXPORT_DECLARED.sub(r"\1", source)
    source = _DYNAMIC.sub("__import(", source)
    left = _LEFT.search(source)
    if left is not None:
        raise _unsupported(version, f"{name}.js says {left[0].strip()!r}.")
    ends = "".join(f"exports.{declaration} = {declaration};\n" for declaration in declared)
    return f"function (exports, __require, __import, __ortlab_modules) {{\n{source}\n{ends}}}"


def _themes(css: str) -> tuple[str, str]:
    """Part the style sheet into the light one and the rules that darkness adds, so that a page can choose."""
    light, dark = [], []
    while _DARK in css:
        before, _, rest = css.partition(_DARK)
        depth, at = 1, 0
        while depth and at < len(rest):
            depth += {"{": 1, "}": -1}.get(rest[at], 0)
            at += 1
        light.append(before)
        dark.append(rest[: at - 1])
        css = rest[at:]
    return "".join([*light, css]), "".join(dark)


def _installed() -> Path:
    found = importlib.util.find_spec("netron")
    if found is None or found.origin is None:
        raise InstallError(
            "netron, which draws the graphs, is not installed.", fix='Run: pip install "netron>=8.9,<9.4"'
        )
    return Path(found.origin).parent


def _version(package: Path) -> str:
    for found in importlib.metadata.distributions(name="netron", path=[str(package.parent)]):
        return found.version
    with contextlib.suppress(OSError):  # a damaged package: what is missing is said when it is assembled
        said = re.search(r'<meta name="version" content="([\d.]+)">', _text(package / "index.html"))
        if said:
            return said[1]
    return "0.0.0"


def _fingerprint(package: Path) -> str:
    """Return a digest of what goes into the page: our files by content, netron's by size and time."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted(STATIC.iterdir()):
        digest.update(file.read_bytes())
    for name in NETRON_MODULES:
        with contextlib.suppress(OSError):  # said when it is assembled
            state = (package / f"{name}.js").stat()
            digest.update(f"{name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _read(file: Path) -> Bundle | None:
    try:
        return Bundle(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or cut short by a full disk: it is made again
        return None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").replace("\r\n", "\n")


def _unsupported(version: str, why: str) -> InstallError:
    return InstallError(
        f"The page of netron {version} cannot be assembled.",
        why=why,
        fix='Run: pip install "netron>=8.9,<9.4"',
    )
