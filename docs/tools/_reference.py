"""Write the reference pages of the site: commands, Python, the result record and exit codes.

The texts are the program's: help screens, docstrings, and the record of a prediction. Python names
are read from the source, so that a build needs no torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping

from _machine import ROOT
from _script import table

import ptrain
from ptrain import errors
from ptrain.cli.arguments import CommandParser
from ptrain.cli.main import GROUPS, main
from ptrain.cli.predict import as_record, predict_spec
from ptrain.cost import Footprint, Operations, Peak, Traffic, TrafficKey
from ptrain.report.record import Check

# The example of the page: a prediction, whose rows are those of a run, too.
_RECORDED = "8b-zero3"
_ROWS: Mapping[str, tuple[type, ...]] = {
    "memory": (Footprint,),
    "peak": (Peak,),
    "traffic": (TrafficKey, Traffic),
    "operations": (Operations,),
    "checks": (Check,),
}
_COLUMN = "`paper` (closed forms), `exact` (predicted), or `measured` (also `simulated`)"


def commands() -> str:
    """Return the page of all commands: the help screen of each."""
    parts = ["# Commands", "The help of every command, as `ptrain COMMAND --help` prints it."]
    for title, verbs in GROUPS.items():
        parts.append(f"## {title}")
        for verb in verbs:
            parts += [f"### ptrain {verb}", f"```text\n{CommandParser(verb).format_help()}```"]
    return "\n\n".join(parts) + "\n"


def python_api() -> str:
    """Return the page of the names that `import ptrain` offers: signatures and docstrings."""
    parts = ["# Python API", "Names of `import ptrain`. [Use ptrain from Python]"
             "(../howto/python.md) shows them in use."]  # fmt: skip
    for name in sorted(ptrain._MODULE_OF, key=str.lower):
        module = ptrain._MODULE_OF[name]
        file = ROOT / f"{module.replace('.', '/')}.py"
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        node = next(node for node in nodes if getattr(node, "name", "") == name)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef), name
        parts += [f"## ptrain.{name}", f"```python\n{_signature(node)}\n```"]
        parts += [_as_markdown(ast.get_docstring(node) or ""), f"Defined in `{module}`."]
    return "\n\n".join(parts) + "\n"


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the first lines of a function, or those of a class and of its fields."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        line = f"def {node.name}({ast.unparse(node.args)}){returns}"
        if len(line) <= 88:
            return line
        words = [ast.unparse(arg) for arg in (*node.args.posonlyargs, *node.args.args)]
        defaults = [f" = {ast.unparse(value)}" for value in node.args.defaults]
        ends = [""] * (len(words) - len(defaults)) + defaults
        lines = [f"    {word}{end}," for word, end in zip(words, ends, strict=True)]
        lines += ["    *,"] * bool(node.args.kwonlyargs)
        for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            end = f" = {ast.unparse(value)}" if value else ""
            lines.append(f"    {ast.unparse(arg)}{end},")
        return "\n".join([f"def {node.name}(", *lines, f"){returns}"])
    fields = [f"    {ast.unparse(part)}" for part in node.body if isinstance(part, ast.AnnAssign)]
    bases = ", ".join(map(ast.unparse, node.bases))
    return "\n".join([f"class {node.name}({bases}):" if bases else f"class {node.name}:", *fields])


_PART = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):$", re.M)


def _as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: its parts as bold words, arguments as a list."""
    first, *parts = _PART.split(docstring)
    lines = [first.strip()]
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        body = inspect.cleandoc(text)
        if title.startswith("Example"):
            body = f"```python\n{body}\n```"
        elif title in ("Args", "Attributes", "Raises"):
            body = re.sub(r"^([\w.*]+): ", r"- `\1`: ", re.sub(r"\n +", " ", body), flags=re.M)
        lines.append(f"**{title}**\n\n{body}")
    return "\n\n".join(lines)


def record() -> str:
    """Return the page of the result record: its keys and the fields of its rows."""
    prediction = predict_spec(_RECORDED, (), allow_import=False, is_quiet=True, offer=True)
    keys = [
        (f"`{key}`", _kind(value), _shorten(value)) for key, value in as_record(prediction).items()
    ]
    parts = [
        "# Result record",
        "`--json` prints the record of a result as JSON, and a run saves it as `summary.json`. "
        "Keys and fields are only added, never renamed. Bytes are integers.",
        f"The keys of `ptrain predict {_RECORDED} --json`:",
        table(["key", "type", "example"], keys).strip(),
    ]
    for key, classes in _ROWS.items():
        parts += [f"## Rows of {key}", (classes[-1].__doc__ or "").partition("\n")[0]]
        fields = [row for of_row in classes for row in _fields(of_row)]
        if key != "checks":
            fields.append(("`column`", "text", _COLUMN))
        parts.append(table(["field", "type", "meaning"], fields).strip())
    return "\n\n".join(parts) + "\n"


def _fields(of_row: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and meaning of each field of a row, as its docstring states them."""
    document = inspect.getdoc(of_row) or ""
    meanings = dict(re.findall(r"^    (\w+): ((?:.+\n?)(?:^ {8}.+\n?)*)", document, re.M))
    for name, kind in inspect.get_annotations(of_row).items():
        if name != "key":
            text = " ".join(meanings.get(name, "").split())
            yield f"`{name}`", f"`{kind}`".replace("|", r"\|"), text


def _kind(value: object) -> str:
    """Return the JSON type of a value."""
    names = {dict: "object", list: "rows", str: "text", bool: "true or false", int: "integer"}
    return names.get(type(value), "null or text")


def _shorten(value: object) -> str:
    """Return an example of a value, without the rows of a list."""
    if isinstance(value, list):
        return f"{len(value)} rows"
    if isinstance(value, dict):
        return ", ".join(f"`{key}`" for key in value) or "empty"
    return f"`{'null' if value is None else value}`" if value != "" else "empty"


def exit_codes() -> str:
    """Return the page of the exit codes, from the docstrings of the errors and of the command."""
    returned = _PART.split(inspect.getdoc(main) or "")
    text = inspect.cleandoc(returned[returned.index("Returns") + 1]).strip()
    _, _, rows = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")
    return (
        f"# Exit codes\n\nA command returns {' '.join(text.split())}\n\n"
        "## Errors\n\nIn Python, each of these is an exception of `ptrain.errors`.\n\n"
        f"```text\n{rows}\n```\n"
    )


PAGES = {
    "reference/commands.md": commands,
    "reference/python.md": python_api,
    "reference/record.md": record,
    "reference/exit-codes.md": exit_codes,
}
