"""Build the site from the pages of the repository: the hooks of `mkdocs build --strict`.

`docs/` holds most pages. This module adds the pages of other folders (README, specs, benchmarks),
the generated reference (`_reference.py`), the notebooks, and a page of source text for each other
file that a page links to. Links are rewritten, so that the pages need no change for the site.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parent))

import _playground
import _reference
from _machine import ROOT
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section

_FIRST = ("README.md", "CHANGELOG.md", "SECURITY.md")  # README links to all other pages
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_COMMENT = re.compile(r"<!-- .*? -->\n?")
_GROUP = re.compile(r"^\| \*\*(.+?)\*\* \| (.+) \|$", re.MULTILINE)
_NAMED = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
HAS_PLAYGROUND = os.environ.get("PTRAIN_PLAYGROUND") == "1"  # needs npm
_LOADED = re.compile(r"<(?!a\b)[^>]* (?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")
_PLAYGROUND = "try/index.html"


def site_path(path: str) -> str:
    """Return the path on the site of a file of the repository, both relative to their roots."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        inner = path.removeprefix("docs/")
        return inner.replace(".ipynb", ".md")
    # mkdocs leaves out names that begin with a dot, such as .ci
    return path if path.endswith(".md") else f"source/{path.lstrip('.')}.md"


def links(path: str, text: str) -> Iterator[str]:
    """Yield the files and folders of the repository to which a page links."""
    for _, target, _ in _LINK.findall(text):
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not linked.startswith("..") and (ROOT / linked).exists():
            yield linked


def page_text(path: str) -> str:
    """Return the Markdown of a file: a page, a notebook, or the text of another file."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(f"{name.name}/" if name.is_dir() else name.name for name in file.iterdir())
        rows = [f"- `{name}`" for name in names if not name.startswith(("__", "."))]
        return "\n".join([_UNSEARCHED, f"# {path}/", "", *rows, ""])
    text = file.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return notebook_text(json.loads(text))
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(file.suffix, "text")
    return f"{_UNSEARCHED}# {path}\n\n~~~~{language}\n{text}~~~~\n"


def notebook_text(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook as Markdown, with the text that they print."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain", ())
            parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not in `docs/`, as far as links lead."""
    texts = {page: make() for page, make in _reference.PAGES.items()}
    waiting = [*_FIRST, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    waiting += [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.ipynb")]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen or PurePosixPath(path).suffix == ".svg" or path == "docs":
            continue
        seen.add(path)
        text = page_text(path)
        if not (path.startswith("docs/") and path.endswith(".md")):
            texts[site_path(path)] = text
        if path.endswith((".md", ".ipynb")):
            waiting += links(path, text)
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    config.extra["repository_path"] = {site_path(path): path for path in seen}
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Lead links to the pages of the site, and leave out comments that mark generated blocks."""
    uri = page.file.src_uri
    path = config.extra["repository_path"].get(uri)
    if path is None:
        return markdown

    def rewritten(link: re.Match[str]) -> str:
        head, _, anchor = link.groups()
        (linked,) = [*links(path, link[0])] or [""]
        if not linked:
            return link[0]
        uri_of_link = site_path(linked) if not linked.endswith(".svg") else linked[len("docs/") :]
        if (ROOT / linked).is_dir() and linked.startswith("docs"):
            return link[0]
        return f"{head}{posixpath.relpath(uri_of_link, posixpath.dirname(uri))}{anchor or ''})"

    return _LINK.sub(rewritten, _COMMENT.sub("", markdown))


def on_nav(nav: Navigation, *, config: Any, files: Files) -> Navigation:
    """Order the navigation as README's table of pages, then the generated reference."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    groups = {
        title: [(name, site_path(path)) for name, path in _NAMED.findall(cell)]
        for title, cell in _GROUP.findall(readme)
    }
    groups["Reference"] += [
        ("Commands", "reference/commands.md"),
        ("Python API", "reference/python.md"),
        ("Result record", "reference/record.md"),
        ("Exit codes", "reference/exit-codes.md"),
    ]
    pages = {page.file.src_uri: page for page in nav.pages}
    home = pages.pop("index.md")
    home.title = "ptrain"
    items: list[Any] = [home]
    for title, rows in groups.items():
        children: list[Any] = []
        for name, uri in rows:
            page = pages.pop(uri)
            page.title = name
            children.append(page)
        section = Section(title, children)
        for child in children:
            child.parent = section
        items.append(section)
    if HAS_PLAYGROUND:
        items.insert(1, Link("Open the playground", _PLAYGROUND))
    # Pages of sources and measurements have no entry; links and the search lead to them.
    ordered = [home, *(page for section in items if section.children for page in section.children)]
    for before, after in zip([None, *ordered], [*ordered, None], strict=True):
        if after is not None:
            after.previous_page = before
        if before is not None:
            before.next_page = after
    for page in pages.values():
        page.previous_page = page.next_page = page.parent = None
    nav.items[:], nav.pages[:] = items, [*ordered, *pages.values()]
    return nav


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Check that a page loads nothing from another host.

    Raises:
        PluginError: If it does.
    """
    if other := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {other[1]} from another host")
    return output


def on_post_build(*, config: Any) -> None:
    """Write the playground into the site, if it was asked for."""
    if HAS_PLAYGROUND:
        _playground.write(Path(config.site_dir) / "try")
