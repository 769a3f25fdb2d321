"""`ptrain help`: the topics of the pages that stand beside what they describe; `ptrain help TOPIC`:
the section of that name, as text; `ptrain help KEY`: what the table of keys has of a spec's key.

A topic is a section's anchor, so that `specs/README.md#dials` and `ptrain help dials` are the same
text. A wheel carries the pages of `specs/` as `ptrain/_specs`, of `launch/` as `ptrain/_launch` …
"""

from __future__ import annotations

import re
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from ptrain.cli.main import VERBS
from ptrain.errors import PtrainError
from ptrain.report.page import PageSection, as_text, sections
from ptrain.spec.leaf import nearest
from ptrain.spec.reference import reference

# In the order of reading; README says what stands in which.
PAGES = (
    "specs/README.md",
    "specs/keys.md",
    "specs/axes.md",
    "specs/strategies.md",
    "specs/predictions.md",
    "launch/README.md",
    "launch/verification.md",
    "launch/loops.md",
    "benchmarks/README.md",
    "ptrain/README.md",
)
_PACKAGE = Path(__file__).resolve().parents[1]
_WIDEST = 100  # columns: longer lines are hard to read


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
    width = max(map(len, PAGES))
    rows = [f"  {page:<{width}}  {', '.join(topics)}" for page, topics in listed.items()]
    return "\n".join(
        [
            "usage: ptrain help TOPIC",
            "",
            "prints a section of these pages; in brackets are topics that it refers to:",
            *rows,
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
