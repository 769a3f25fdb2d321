"""The command `ptrain specs`: list the built-in specs, models and clusters, or show one as YAML.

`ptrain specs show NAME [a.b=c]` prints a resolved spec that can be saved and run.
"""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from pathlib import Path

from ptrain.errors import PtrainError
from ptrain.report.printed import minimal_spec
from ptrain.report.screen import next_line, print_screen, screen_width
from ptrain.report.table import Importance, TableColumn, name_column, render_table
from ptrain.spec.load import expand, load
from ptrain.spec.names import SPEC_FOLDERS, list_files, load_names
from ptrain.spec.text import read

Row = dict[str, object]
_PRESETS = ("models", "clusters")


def run(args: Namespace) -> int:
    """List or show specs; return 0.

    Raises:
        PtrainError: If the arguments are wrong.
    """
    match args.words:
        case []:
            _list_specs(as_json=args.json)
        case ["show", name, *overrides]:
            _show_spec(name, overrides, as_json=args.json)
        case ["show"]:
            raise PtrainError("ptrain specs show: NAME is missing. `ptrain specs` lists the names.")
        case [word, *_]:
            raise PtrainError(
                f"ptrain specs: unknown argument {word!r}. Use `ptrain specs show {word}`."
            )
    return 0


def _list_specs(*, as_json: bool) -> None:
    """Print all built-in specs, models, clusters and aliases."""
    rows = [_spec_row(folder, path) for folder in SPEC_FOLDERS for path in _folder_files(folder)]
    rows += [_preset_row(folder, path) for folder in _PRESETS for path in _folder_files(folder)]
    all_names = load_names()
    if as_json:
        print(json.dumps({"specs": rows, "aliases": all_names.aliases}))
        return
    for folder in (*SPEC_FOLDERS, *_PRESETS):
        if of_folder := [row for row in rows if row["folder"] == folder]:
            print(_folder_table(folder, of_folder))
    aliases = ", ".join(f"{alias} = {name}" for alias, name in all_names.aliases.items())
    wrapped = textwrap.wrap(aliases, screen_width() - 2)
    print("aliases:", textwrap.indent("\n".join(wrapped), "  "), sep="\n")
    print_screen("", next_line("ptrain specs show zero3"))


def _folder_files(folder: str) -> list[Path]:
    """Return the files of a folder of specs or presets."""
    return list(list_files(folder).values())


def _spec_row(folder: str, path: Path) -> Row:
    """Return the row of a spec."""
    spec = load(path).spec
    return {
        "name": path.stem,
        "folder": folder,
        "ranks": spec.world_size,
        "placement": {factor.axis.value: str(factor.placement) for factor in spec.factors},
        "about": _description(path),
    }


def _preset_row(folder: str, path: Path) -> Row:
    """Return the row of a model or a cluster."""
    return {"name": path.stem, "folder": folder, "about": _description(path)}


def _description(path: Path) -> str:
    """Return the description of a file: its first comment that is not for editors."""
    lines = path.read_text(encoding="utf-8").splitlines()
    # Editors read the schema's location from a comment, `# yaml-language-server: $schema=…`.
    comments = [line[2:] for line in lines if line.startswith("# ")]
    return next(line for line in comments if not line.startswith("yaml-language-server"))


def _folder_table(folder: str, rows: list[Row]) -> str:
    """Return the table of one folder."""
    columns = [name_column("", [str(row["name"]) for row in rows])]
    if folder in SPEC_FOLDERS:
        ranks = [f"{row['ranks']} ranks" for row in rows]
        columns.append(TableColumn("", cells=ranks, left=True))
        columns.append(TableColumn("", cells=[*map(_placement_text, rows)], left=True))
    about = [str(row["about"]) for row in rows]
    columns.append(TableColumn("", Importance.RESULT, about, left=True))
    return f"{folder}:\n{textwrap.indent(render_table(columns, screen_width() - 2), '  ')}"


def _placement_text(row: Row) -> str:
    """Return the placement of a row as text."""
    placement = row["placement"]
    assert isinstance(placement, dict), "a spec's row says where its states are"
    return " ⊗ ".join(f"{axis}: {modes}" for axis, modes in placement.items())


def _show_spec(name: str, overrides: list[str], *, as_json: bool) -> None:
    """Print one spec or preset. A preset without overrides is printed as its file."""
    preset = list_files(*_PRESETS).get(name)
    if preset and not overrides:
        print(
            json.dumps(read(preset).root)
            if as_json
            else preset.read_text(encoding="utf-8").rstrip()
        )
        return
    documents = [minimal_spec(document.spec) for document in expand(name, overrides)]
    if as_json:
        mappings = [shown_spec.mapping for shown_spec in documents]
        print(json.dumps(mappings if len(mappings) > 1 else mappings[0]))
    else:
        print("---\n".join(document.as_yaml() for document in documents), end="")
