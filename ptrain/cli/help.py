"""`ptrain help`: the topics of the pages that stand beside what they describe; `ptrain help TOPIC`:
the section of that name, as text; `ptrain help KEY`: what the table of keys has of a spec's key.

A topic is a section's anchor: `docs/writing-a-spec.md#options` and `ptrain help options` are the
same text. A wheel carries the pages of `docs/` as `ptrain/_docs`, of `specs/` as `ptrain/_specs`.
Pages are Markdown, which rich renders; of the comments in it those that mark a generated block are
left out, and a link's target is written as the topic that it leads to.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Markdown, TableElement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from ptrain.cli.main import VERBS
from ptrain.errors import PtrainError
from ptrain.report.table import TableColumn, name_column, render
from ptrain.spec.leaf import nearest
from ptrain.spec.reference import reference

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
_WIDEST = 100  # columns: longer lines are hard to read
_FENCE = "```"
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


def add_arguments(parser: ArgumentParser) -> None:
    about = "a name that `ptrain help` lists, or a key of a spec: optimizer.clip"
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help=about)


def run(args: Namespace) -> int:
    if args.topic is None:
        print(_listing())
        return 0
    known = {section.anchor: section for page in PAGES for section in page_sections(page)}
    topic = "-".join(args.topic.lower().split())
    title = known[topic].title if topic in known else args.topic
    texts = (known[topic].text if topic in known else "", _of_key(args.topic, known["keys"]))
    text = "\n\n".join(filter(None, texts))
    if not text:
        raise PtrainError(_unknown(args.topic, topic, known))
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    print(f"{title}\n\n{as_text(text, width)}")
    return 0


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
    """The sections of a page, in the wheel or in the checkout."""
    folder, _, name = page.partition("/")
    packed = _PACKAGE / f"_{folder}" / name
    path = packed if packed.is_file() else _PACKAGE.parent / page
    return sections(path.read_text(encoding="utf-8"))


def _listing() -> str:
    listed = {page: [section.anchor for section in page_sections(page)] for page in PAGES}
    topics = TableColumn("", cells=[", ".join(anchors) for anchors in listed.values()], left=True)
    return "\n".join(
        [
            "usage: ptrain help TOPIC",
            "",
            "prints a section of these pages; in brackets are topics that it refers to:",
            textwrap.indent(render([name_column("", [*listed]), topics]), "  "),
            "",
            "A key of a spec is a topic too: ptrain help optimizer.clip",
            "`ptrain --help` lists the commands, `ptrain COMMAND --help` the options of one.",
        ]
    )


def _unknown(written: str, topic: str, known: Mapping[str, PageSection]) -> str:
    keys = tuple(row.place for row in reference())
    near = (nearest(topic, tuple(known)), *(key for key in keys if key.rpartition(".")[2] == topic))
    guess = next(filter(None, near), "") if topic else ""
    if topic in VERBS:
        hint = f"; its options: ptrain {topic} --help"
    else:
        hint = f"; did you mean {guess!r}?" if guess else ""
    spoken = _sections_with(written, known)
    lines = [
        f"ptrain help: {written!r} is no topic{hint}",
        *([f"  the word stands in: {', '.join(spoken)}"] if spoken else []),
        f"  topics: {', '.join(known)}",
    ]
    return "\n".join(lines)


def _sections_with(words: str, known: Mapping[str, PageSection]) -> list[str]:
    """The topics that say it as a whole word, the plural of it or its singular; small letters and
    capitals are the same."""
    text = words.strip().removesuffix("s")
    if not text:
        return []
    pattern = re.compile(rf"(?<!\w){re.escape(text)}s?(?!\w)", re.IGNORECASE)
    return [anchor for anchor, section in known.items() if pattern.search(section.text)]
