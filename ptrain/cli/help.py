"""`ptrain help`: list the topics of the docs. `ptrain help TOPIC`: print a section, a page or a key
of a spec, or the lines that mention a word.

A topic is a section's anchor: `docs/writing-a-spec.md#options` and `ptrain help options` are the
same text. A page's file name and title are topics, too. A wheel carries the pages of `docs/` as
`ptrain/_docs`, of `specs/` as `ptrain/_specs`.
Pages are Markdown, which rich renders; of the comments in it those that mark a generated block are
left out, and a link's target is written as the topic that it leads to.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Markdown, TableElement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from ptrain.cli.arguments import CommandParser
from ptrain.cli.main import VERBS
from ptrain.errors import PtrainError
from ptrain.spec.names import SPEC_FOLDERS, listing
from ptrain.spec.schema import reference

# In reading order. README links to each page.
PAGES = (
    "docs/tour.md",
    "docs/concepts.md",
    "docs/coming-from.md",
    "docs/writing-a-spec.md",
    "docs/howto/fit-a-model.md",
    "docs/howto/choose-a-placement.md",
    "docs/howto/your-model.md",
    "docs/howto/your-data.md",
    "docs/howto/your-loss.md",
    "docs/howto/lora.md",
    "docs/howto/launch.md",
    "docs/howto/resume-and-restart.md",
    "docs/howto/watch-a-run.md",
    "docs/howto/security.md",
    "docs/howto/published-weights.md",
    "docs/howto/chats.md",
    "docs/howto/verify-a-spec.md",
    "docs/howto/verify-a-loop.md",
    "docs/howto/verify-with-your-trainer.md",
    "docs/howto/python.md",
    "docs/howto/gate-a-pull-request.md",
    "specs/README.md",
    "specs/keys.md",
    "docs/axes/README.md",
    "docs/axes/data.md",
    "docs/axes/tensor.md",
    "docs/axes/context.md",
    "docs/axes/expert.md",
    "docs/axes/pipeline.md",
    "docs/activations.md",
    "docs/strategies.md",
    "docs/predictions.md",
    "docs/troubleshooting.md",
    "docs/what-is-verified.md",
    "docs/glossary.md",
    "docs/internals.md",
)
_PACKAGE = Path(__file__).resolve().parents[1]
_GLOSSARY, _MOST_HITS = "docs/glossary.md", 10
_WIDEST = 100  # columns: longer lines are hard to read
_FENCE = "```"
_CODE = re.compile(r"(```|<!--).*?(```|-->)\s*|^\|.*\n", re.DOTALL)
_COMMENT = re.compile(r"<!-- .*? -->\n?")
_PICTURE = re.compile(r"!\[([^\]]*)\]\([^)\s]+\)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class PageSection:
    """A second heading of a page with all that stands below it, up to the next one."""

    title: str
    text: str

    @property
    def anchor(self) -> str:
        return anchor(self.title)


class _Code(CodeBlock):
    """Code whose lines are kept as they are, so that they can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = textwrap.indent(str(self.text).rstrip(), "  ")
        yield Text(code, self.style_name, no_wrap=True, overflow="ignore")


class _Table(TableElement):
    """A table whose words are whole: rich would write a long key as `optimizer.sched…`, or fold it.
    Where the longest words of the columns are too wide together, each row is a paragraph."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        assert self.header is not None and self.header.row is not None and self.body is not None
        heads = [cell.content for cell in self.header.row.cells]
        rows = [[cell.content for cell in row.cells] for row in self.body.rows]
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column, cells in zip(table.columns, zip(heads, *rows, strict=True), strict=True):
                column.min_width = max(map(_longest_word, cells))
            # a column that rich has to widen to its longest word makes the whole too wide
            text = "".join(segment.text for segment in console.render(table, options))
            if max(cell_len(line.rstrip()) for line in text.splitlines()) <= options.max_width:
                yield table
            else:
                yield from (line for row in rows for line in _paragraph(heads, row))


def _longest_word(cell: Text) -> int:
    return max(map(len, cell.plain.split()), default=0)


def _paragraph(heads: Sequence[Text], row: Sequence[Text]) -> Iterator[RenderableType]:
    """Yield the first cell of a row and below it, indented, each other one behind its title."""
    yield row[0]
    for head, cell in zip(heads[1:], row[1:], strict=True):
        if cell.plain not in ("", "–"):
            title = f"{head.plain}: " if len(heads) > 2 and head.plain else ""
            yield Padding(Text.assemble(title, cell), (0, 0, 0, 2))


class _Page(Markdown):
    elements = Markdown.elements | {"fence": _Code, "table_open": _Table}


def run(args: Namespace) -> int:
    """Print what a word names: a section, a page, a key or a command; else where it is mentioned.
    A word that only one section mentions prints this section.
    Raises PtrainError for a word that no page mentions."""
    word = " ".join(args.topic).strip()
    print(_answer(word) if word else _listing())
    return 0


def _answer(word: str) -> str:
    pages = {page: read_page(page) for page in PAGES}
    topic = "-".join(word.lower().split())
    topics = _topics(pages)
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    section = topics.get(topic)
    rows = _of_key(word, topics["keys"])
    hits = {} if section else _hits(word, pages, finds_titles_only=bool(rows))
    if len(hits) == 1 and "glossary" not in hits and not rows and topic not in VERBS:
        section = topics[next(iter(hits))]
    parts = [section.title if section else word]
    parts += [as_text(text, width) for text in (section.text if section else "", rows) if text]
    if topic in VERBS:
        if not section:
            return CommandParser(topic).format_help().rstrip()
        parts.append(f"Next: ptrain {topic} --help")
    if not section:
        if not (hits or rows):
            raise PtrainError(_unknown(word, (*topics, *(row.place for row in reference()))))
        size = max(map(len, hits), default=0)
        room = width - size - 4
        lines = [
            f"  {name:<{size}}  {textwrap.shorten(line, room, placeholder=' …')}"
            for name, line in hits.items()
        ]
        is_spec = word in listing(*SPEC_FOLDERS)
        command = f"specs show {word}" if is_spec else f"help {next(iter(hits), '')}"
        parts += ["\n".join(lines), f"Next: ptrain {command}"] if hits else []
    return "\n\n".join(parts)


def _topics(pages: Mapping[str, str]) -> dict[str, PageSection]:
    """Return all sections by anchor, and all pages by file name and by title. Sections win."""
    topics = {}
    for page, text in pages.items():
        title, _, rest = text.removeprefix("# ").partition("\n")
        for name in {Path(page).stem.lower(), anchor(title)} - {"readme"}:
            topics[name] = PageSection(title, rest.strip() + "\n")
    return topics | {
        section.anchor: section for text in pages.values() for section in sections(text)
    }


def _hits(word: str, pages: Mapping[str, str], *, finds_titles_only: bool) -> dict[str, str]:
    """Return the topics that mention a word or phrase, each with the line that does: titles first,
    then the glossary, then by the number of mentions. Case and plural do not matter."""
    stems = [re.escape(part.removesuffix("s")) for part in word.split()]
    pattern = re.compile(rf"(?<!\w){'s?[ -]'.join(stems)}s?\d?(?!\w)", re.IGNORECASE)
    ranked = []
    for page, text in pages.items():
        for section in sections(text):
            is_title = bool(pattern.search(section.title))
            prose = _CODE.sub("", section.text).splitlines() if is_title else []
            lines = filter(None, (_mention(pattern, line) for line in section.text.splitlines()))
            mentions = [*filter(None, map(_without_markup, prose[:1])), *lines]
            order = 0 if is_title else 1 if page == _GLOSSARY else 2
            if mentions and (is_title or not finds_titles_only):
                ranked.append((order, -len(mentions), section.anchor, mentions[0]))
    ranked.sort(key=lambda hit: hit[:2])
    return {name: line for _, _, name, line in ranked[:_MOST_HITS]}


def _mention(pattern: re.Pattern[str], line: str) -> str:
    """Return the part of a line that begins shortly before the word; of a table's row the first
    cell and the cell with the word. Return "" for a line without the word."""
    first, *cells = (_without_markup(cell) for cell in line.strip("| ").split("|"))
    cell = next(filter(pattern.search, (first, *cells)), "")
    if not (match := pattern.search(cell)):
        return ""
    start = cell.rfind(" ", 0, max(0, match.start() - 30)) + 1
    part = f"… {cell[start:]}" if start else cell
    return part if cell is first else f"{first}: {part}"


def _without_markup(line: str) -> str:
    """Return a line of Markdown as plain words."""
    text = _LINK.sub(r"\1", _COMMENT.sub("", f"{line}\n")).replace("\\", "")
    return " ".join(re.sub(r"[`*#]|^\s*[-–>]+ |-{3,}|<.*?>", "", text).split())


def as_text(markdown: str, width: int) -> str:
    """Return the text for a standard output of so many columns: with colours on a terminal, where
    NO_COLOR does not forbid them, and plain elsewhere. Code keeps its lines."""
    console = Console(width=width, theme=Theme({"markdown.code": "bold cyan"}))
    text = _PICTURE.sub(r"\\[picture: \1]", _COMMENT.sub("", markdown))
    page = _Page(_LINK.sub(_linked, text), hyperlinks=False)
    with console.capture() as capture:
        console.print(page, crop=False)
    lines = map(str.rstrip, capture.get().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _linked(link: re.Match[str]) -> str:
    """Return what a link is called and, in brackets, the topic that it leads to."""
    _, _, topic = link[2].partition("#")
    is_said = not topic or topic == anchor(link[1])
    return link[1] if is_said else f"{link[1]} \\[{topic}]"


def anchor(title: str) -> str:
    """Return what a forge calls a heading in a link: small letters, hyphens, no other sign."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def sections(page: str) -> list[PageSection]:
    """Return the sections of a page in their order; what stands before the first one is not in
    them."""
    parts: list[tuple[str, list[str]]] = []
    is_code = False
    for line in page.splitlines():
        is_code ^= line.startswith(_FENCE)
        if line.startswith("## ") and not is_code:
            parts.append((line[3:].strip(), []))
        elif parts:
            parts[-1][1].append(line)
    return [PageSection(title, "\n".join(lines).strip() + "\n") for title, lines in parts]


def _of_key(key: str, table: PageSection) -> str:
    """The rows of a key and of those below it, with the table's head; nothing for another word."""
    head, rule, *rows = (line for line in table.text.splitlines() if line.startswith("|"))
    rows = [row for row in rows if row.startswith((f"| `{key}` |", f"| `{key}."))]
    return "\n".join([head, rule, *rows]) if rows else ""


def page_sections(page: str) -> list[PageSection]:
    """Return the sections of a page, in the wheel or in the checkout."""
    return sections(read_page(page))


def read_page(page: str) -> str:
    """Return the text of a page, in the wheel or in the checkout."""
    folder, _, name = page.partition("/")
    packed = _PACKAGE / f"_{folder}" / name
    path = packed if packed.is_file() else _PACKAGE.parent / page
    return path.read_text(encoding="utf-8")


def _listing() -> str:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    lines = ["Usage: ptrain help TOPIC", "", "Pages and their topics:"]
    for page in PAGES:
        topics = ", ".join(section.anchor for section in page_sections(page))
        lines.append(f"  {page}")
        lines += textwrap.wrap(
            topics,
            width,
            initial_indent="    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    return "\n".join(
        [
            *lines,
            "",
            "A page is a topic (ptrain help launch), and so is a key (ptrain help optimizer.clip).",
            "Any other word is looked for in all pages: ptrain help gradient accumulation",
            "Next: ptrain help quick-tour",
        ]
    )


def _unknown(word: str, known: Sequence[str]) -> str:
    near = [name for name in known if word.lower() in name.split("-")] or get_close_matches(
        word.lower(), known, cutoff=0.6
    )
    hint = f"Nearest topics: {', '.join(near)}." if near else "`ptrain help` lists the topics."
    return f"ptrain help: no page mentions {word!r}. {hint}"
