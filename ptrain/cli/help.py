"""The command `ptrain help [TOPIC]`: list the topics, or print a section, a page, or a key.

A topic is a section's anchor: `docs/writing-a-spec.md#options` and `ptrain help options` are the
same text. A page's file name and title are topics, too. For other words the command prints the
lines that mention them. A wheel has the pages of `docs/` in `ptrain/_docs`, and of `specs/` in
`ptrain/_specs`. Pages are Markdown, which rich renders, without comments. A link is printed with
the topic that it leads to.
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
from ptrain.spec.check import iter_key_rows
from ptrain.spec.names import SPEC_FOLDERS, list_files

# In reading order. README links to each page.
PAGES = (
    "docs/tour.md",
    "docs/concepts.md",
    "docs/coming-from.md",
    "docs/writing-a-spec.md",
    "docs/howto/fit-a-model.md",
    "docs/howto/choose-a-placement.md",
    "docs/howto/playground.md",
    "docs/howto/your-model.md",
    "docs/howto/your-data.md",
    "docs/howto/your-loss.md",
    "docs/howto/lora.md",
    "docs/howto/launch.md",
    "docs/howto/resume-and-restart.md",
    "docs/howto/watch-a-run.md",
    "docs/howto/report.md",
    "docs/howto/security.md",
    "docs/howto/published-weights.md",
    "docs/howto/chats.md",
    "docs/howto/verify-a-spec.md",
    "docs/howto/verify-a-loop.md",
    "docs/howto/verify-with-your-trainer.md",
    "docs/howto/xray.md",
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
    """A section of a page: a second-level heading and the text up to the next one."""

    title: str
    text: str

    @property
    def anchor(self) -> str:
        """The topic of the section."""
        return heading_anchor(self.title)


class _Code(CodeBlock):
    """A code block whose lines are never wrapped, so that they can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = textwrap.indent(str(self.text).rstrip(), "  ")
        yield Text(code, self.style_name, no_wrap=True, overflow="ignore")


class _Table(TableElement):
    """A table that does not break words: rich would shorten a long key, or fold it.

    If the longest words of the columns are too wide together, each row is printed as a paragraph.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        assert self.header is not None and self.header.row is not None and self.body is not None
        heads = [cell.content for cell in self.header.row.cells]
        rows = [[cell.content for cell in row.cells] for row in self.body.rows]
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column, cells in zip(table.columns, zip(heads, *rows, strict=True), strict=True):
                column.min_width = max(map(_longest_word, cells))
            # rich widens a column to its longest word even if the table then exceeds the width
            text = "".join(segment.text for segment in console.render(table, options))
            if max(cell_len(line.rstrip()) for line in text.splitlines()) <= options.max_width:
                yield table
            else:
                yield from (line for row in rows for line in _row_paragraph(heads, row))


def _longest_word(cell: Text) -> int:
    """Return the number of characters of the longest word of a cell."""
    return max(map(len, cell.plain.split()), default=0)


def _row_paragraph(heads: Sequence[Text], row: Sequence[Text]) -> Iterator[RenderableType]:
    """Yield the first cell of a row, and below it the other cells, indented, with their titles."""
    yield row[0]
    for head, cell in zip(heads[1:], row[1:], strict=True):
        if cell.plain not in ("", "–"):
            title = f"{head.plain}: " if len(heads) > 2 and head.plain else ""
            yield Padding(Text.assemble(title, cell), (0, 0, 0, 2))


class _Page(Markdown):
    """A Markdown page with these code blocks and tables."""

    elements = Markdown.elements | {"fence": _Code, "table_open": _Table}


def run(args: Namespace) -> int:
    """Print the text for a word: a section, a page, a key, a command, or lines that mention it.

    A word that only one section mentions prints that section.

    Raises:
        PtrainError: If no page mentions the word.
    """
    word = " ".join(args.topic).strip()
    print(_topic_text(word) if word else _topic_list())
    return 0


def _topic_text(word: str) -> str:
    """Return the text for a word."""
    pages = {page: read_page(page) for page in PAGES}
    topic = "-".join(word.lower().split())
    topics = _find_topics(pages)
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    section = topics.get(topic)
    rows = _key_rows(word, topics["keys"])
    hits = {} if section else _find_mentions(word, pages, finds_titles_only=bool(rows))
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
            raise PtrainError(
                _unknown_topic(word, (*topics, *(row.place for row in iter_key_rows())))
            )
        size = max(map(len, hits), default=0)
        room = width - size - 4
        lines = [
            f"  {name:<{size}}  {textwrap.shorten(line, room, placeholder=' …')}"
            for name, line in hits.items()
        ]
        is_spec = word in list_files(*SPEC_FOLDERS)
        command = f"specs show {word}" if is_spec else f"help {next(iter(hits), '')}"
        parts += ["\n".join(lines), f"Next: ptrain {command}"] if hits else []
    return "\n\n".join(parts)


def _find_topics(pages: Mapping[str, str]) -> dict[str, PageSection]:
    """Return all sections by anchor, and all pages by file name and title.

    A section takes precedence over a page.
    """
    topics = {}
    for page, text in pages.items():
        title, _, rest = text.removeprefix("# ").partition("\n")
        for name in {Path(page).stem.lower(), heading_anchor(title)} - {"readme"}:
            topics[name] = PageSection(title, rest.strip() + "\n")
    return topics | {
        section.anchor: section for text in pages.values() for section in split_sections(text)
    }


def _find_mentions(
    word: str, pages: Mapping[str, str], *, finds_titles_only: bool
) -> dict[str, str]:
    """Return the topics that mention a word or phrase, each with the line that mentions it.

    Titles come first, then the glossary, then the sections with the most mentions. Case and plural
    are ignored.
    """
    # A plural ending, a hyphen instead of a space, and a digit (`zero3`) match too.
    stems = [re.escape(part.removesuffix("s")) for part in word.split()]
    pattern = re.compile(rf"(?<!\w){'s?[ -]'.join(stems)}s?\d?(?!\w)", re.IGNORECASE)
    ranked = []
    for page, text in pages.items():
        for section in split_sections(text):
            is_title = bool(pattern.search(section.title))
            prose = _CODE.sub("", section.text).splitlines() if is_title else []
            lines = filter(
                None, (_find_mention(pattern, line) for line in section.text.splitlines())
            )
            mentions = [*filter(None, map(_without_markup, prose[:1])), *lines]
            order = 0 if is_title else 1 if page == _GLOSSARY else 2
            if mentions and (is_title or not finds_titles_only):
                ranked.append((order, -len(mentions), section.anchor, mentions[0]))
    ranked.sort(key=lambda hit: hit[:2])
    return {name: line for _, _, name, line in ranked[:_MOST_HITS]}


def _find_mention(pattern: re.Pattern[str], line: str) -> str:
    """Return the part of a line that begins shortly before the word; empty if the word is missing.

    In a table row, the first cell and the cell with the word are returned.
    """
    first, *cells = (_without_markup(cell) for cell in line.strip("| ").split("|"))
    cell = next(filter(pattern.search, (first, *cells)), "")
    if not (match := pattern.search(cell)):
        return ""
    start = cell.rfind(" ", 0, max(0, match.start() - 30)) + 1
    part = f"… {cell[start:]}" if start else cell
    return part if cell is first else f"{first}: {part}"


def _without_markup(line: str) -> str:
    """Return a line of Markdown as plain text."""
    text = _LINK.sub(r"\1", _COMMENT.sub("", f"{line}\n")).replace("\\", "")
    return " ".join(re.sub(r"[`*#]|^\s*[-–>]+ |-{3,}|<.*?>", "", text).split())


def as_text(markdown: str, width: int) -> str:
    """Render Markdown for a terminal.

    Args:
        markdown: The text of a page.
        width: The number of columns. Code is not wrapped.

    Returns:
        The text, with colours if standard output is a terminal and NO_COLOR is not set.
    """
    console = Console(width=width, theme=Theme({"markdown.code": "bold cyan"}))
    text = _PICTURE.sub(r"\\[picture: \1]", _COMMENT.sub("", markdown))
    page = _Page(_LINK.sub(_link_text, text), hyperlinks=False)
    with console.capture() as capture:
        console.print(page, crop=False)
    lines = map(str.rstrip, capture.get().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _link_text(link: re.Match[str]) -> str:
    """Return a link's text, with its topic in brackets."""
    _, _, topic = link[2].partition("#")
    is_said = not topic or topic == heading_anchor(link[1])
    return link[1] if is_said else f"{link[1]} \\[{topic}]"


def heading_anchor(title: str) -> str:
    """Return the anchor of a heading in a link: lower case, hyphens, and no other punctuation."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def split_sections(page: str) -> list[PageSection]:
    """Return the sections of a page in order, without the text before the first heading."""
    parts: list[tuple[str, list[str]]] = []
    is_code = False  # `## ` in a code block is a comment, not a heading
    for line in page.splitlines():
        is_code ^= line.startswith(_FENCE)
        if line.startswith("## ") and not is_code:
            parts.append((line[3:].strip(), []))
        elif parts:
            parts[-1][1].append(line)
    return [PageSection(title, "\n".join(lines).strip() + "\n") for title, lines in parts]


def _key_rows(key: str, table: PageSection) -> str:
    """Return the table rows of a key and of the keys below it; empty for another word."""
    head, rule, *rows = (line for line in table.text.splitlines() if line.startswith("|"))
    rows = [row for row in rows if row.startswith((f"| `{key}` |", f"| `{key}."))]
    return "\n".join([head, rule, *rows]) if rows else ""


def page_sections(page: str) -> list[PageSection]:
    """Return the sections of a page of the wheel or the checkout."""
    return split_sections(read_page(page))


def read_page(page: str) -> str:
    """Return the text of a page of the wheel or the checkout."""
    folder, _, name = page.partition("/")
    packed = _PACKAGE / f"_{folder}" / name
    path = packed if packed.is_file() else _PACKAGE.parent / page
    return path.read_text(encoding="utf-8")


def _topic_list() -> str:
    """Return the list of pages and topics."""
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


def _unknown_topic(word: str, known: Sequence[str]) -> str:
    """Return the message for a word that no page mentions, with the nearest topics."""
    near = [name for name in known if word.lower() in name.split("-")] or get_close_matches(
        word.lower(), known, cutoff=0.6
    )
    hint = f"Nearest topics: {', '.join(near)}." if near else "`ptrain help` lists the topics."
    return f"ptrain help: no page mentions {word!r}. {hint}"
