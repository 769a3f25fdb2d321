"""Pages in Markdown as text for a terminal: their sections, and what a section looks like there.

Only what the pages of this repository use is known: headings, paragraphs, lists, tables, code
between fences, links, and the comments that mark a generated block, which are left out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptrain.report.table import render

_FENCE, _RULE = "```", re.compile(r"\|[\s:|-]+\|")
_COMMENT = re.compile(r"<!-- .*? -->\n?")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"- |\d+\. ")
_CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class PageSection:
    """A second heading of a page with all that stands below it, up to the next one."""

    title: str
    text: str

    @property
    def anchor(self) -> str:
        return anchor(self.title)


def anchor(title: str) -> str:
    """Return what a forge calls a heading in a link: small letters, hyphens, no other sign."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def headings(page: str) -> Iterator[tuple[int, str]]:
    """Depth and title of the headings, those in code left out."""
    is_code = False
    for line in page.splitlines():
        is_code ^= line.startswith(_FENCE)
        depth = len(line) - len(line.lstrip("#"))
        if not is_code and depth and line[depth:].startswith(" "):
            yield depth, line[depth:].strip()


def sections(page: str) -> list[PageSection]:
    """The sections of a page in their order; what stands before the first one is not in them."""
    parts: list[tuple[str, list[str]]] = []
    is_code = False
    for line in page.splitlines():
        is_code ^= line.startswith(_FENCE)
        if line.startswith("## ") and not is_code:
            parts.append((line[3:].strip(), []))
        elif parts:
            parts[-1][1].append(line)
    return [PageSection(title, "\n".join(lines).strip() + "\n") for title, lines in parts]


def as_text(markdown: str, width: int) -> str:
    """The text for a terminal of so many columns. Code keeps its lines."""
    return "\n\n".join(_block(lines, width) for lines in _blocks(_COMMENT.sub("", markdown)))


def _blocks(markdown: str) -> Iterator[list[str]]:
    """What blank lines part; code is one block, with the blank lines in it."""
    block: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        is_fence = line.startswith(_FENCE)
        if block and not is_code and (is_fence or not line.strip()):
            yield block
            block = []
        is_code ^= is_fence
        if is_code or line.strip():
            block.append(line)
        if is_fence and not is_code:
            yield block
            block = []
    if block:
        yield block


def _block(lines: Sequence[str], width: int) -> str:
    match lines[0][0]:
        case "`" if lines[0].startswith(_FENCE):
            return textwrap.indent("\n".join(lines[1:-1]), "  ")
        case "|":
            return _table([_cells(line) for line in lines if not _RULE.fullmatch(line)], width)
        case "#":
            return _plain(lines[0].lstrip("# "))
        case _:
            return "\n".join(_filled(item, width) for item in _items(lines))


def _items(lines: Sequence[str]) -> list[str]:
    """The items of a list, each on one line; a paragraph is one."""
    items: list[str] = []
    for line in lines:
        if items and not _ITEM.match(line):
            items[-1] += " " + line.strip()
        else:
            items.append(line)
    return items


def _filled(item: str, width: int) -> str:
    mark = _ITEM.match(item)
    return textwrap.fill(
        _plain(item),
        width,
        subsequent_indent=" " * len(mark[0]) if mark else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cells(line: str) -> list[str]:
    return [_plain(cell.strip()) for cell in _CELLS.split(line.strip())[1:-1]]


def _table(rows: Sequence[Sequence[str]], width: int) -> str:
    """A table where it is narrow enough, else a row as its first cell and a line for each other."""
    columns, *others = rows
    text = render(columns, others, left=range(len(columns)))
    if max(map(len, text.splitlines())) <= width:
        return text
    return "\n".join(line for row in others for line in _record(columns, row, width))


def _record(columns: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    yield _hanging(row[0], width)
    for column, cell in zip(columns[1:], row[1:], strict=True):
        head = f"  {column}: " if len(columns) > 2 and column else "  "
        if cell and cell != "–":
            yield _hanging(head + cell, width)


def _hanging(text: str, width: int) -> str:
    return textwrap.fill(
        text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _plain(text: str) -> str:
    """A text without the signs of emphasis and escape; of a link what it is called, and in
    brackets the topic that it leads to."""
    text = _LINK.sub(_linked, text).replace("**", "")
    return re.sub(r"\\([*|_])", r"\1", text)


def _linked(link: re.Match[str]) -> str:
    _, _, topic = link[2].partition("#")
    is_said = not topic or topic == anchor(link[1])
    return link[1] if is_said else f"{link[1]} [{topic}]"
