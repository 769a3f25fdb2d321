"""Write the playground: its pages, Pyodide, and an archive of ptrain, into a folder of the site.

`python docs/tools/_playground.py FOLDER` writes it alone, to look at with `python -m http.server`.
`python docs/tools/pages.py docs/howto/playground.md` measures its size and its seconds in Chromium.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from _machine import ROOT
from _script import table

from ptrain.charts.svg import DARK_RULES
from ptrain.cli.completion import keys_of_schema
from ptrain.derivation.estimate import facts_from_shape
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.check import iter_key_rows
from ptrain.spec.load import load
from ptrain.spec.names import SPEC_FOLDERS, list_files, specs_folder

PYODIDE, PLAYWRIGHT = "pyodide@314.0.7", "playwright-core@1"  # Pyodide has Python 3.14
NPM = ROOT / "build" / "npm"
FIRST = "8b-zero3"  # the spec that is shown first
_RUNTIME = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
_TORCH = re.compile(r"^(?:import|from) (?:torch|numpy)\b", re.MULTILINE)
_SOURCE = ROOT / "docs" / "playground"
_NO_SPECS = ("*.md", "*.json")  # files of specs/ that a prediction does not read
_NOT_NEEDED = ("__pycache__", "*.so", "_specs", "_docs")


def fetch_package(package: str) -> Path:
    """Return the folder of an npm package (`name@version`), which is downloaded if it is missing.

    Raises:
        OSError: If npm is not installed, or cannot reach a registry.
    """
    root = NPM / package
    folder = root / "node_modules" / package.partition("@")[0]
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        command = [
            "npm",
            "install",
            "--no-save",
            "--silent",
            "--prefix",
            str(root),
            package,
        ]
        try:
            subprocess.run(command, check=True, timeout=300)
        except subprocess.SubprocessError as error:
            raise OSError(f"npm cannot install {package}: {error}") from error
    return folder


def write(folder: Path) -> None:
    """Write the playground to a folder.

    Raises:
        OSError: If npm is not installed, or cannot reach a registry.
    """
    pyodide = fetch_package(PYODIDE)
    folder.mkdir(parents=True, exist_ok=True)
    for file in _SOURCE.iterdir():
        if file.suffix in (".html", ".css", ".js"):
            shutil.copyfile(file, folder / file.name)
    with (folder / "style.css").open("a", encoding="utf-8") as style:  # of the pictures
        style.write(f"@media (prefers-color-scheme: dark) {{ {DARK_RULES} }}\n")
    (folder / "pyodide").mkdir(exist_ok=True)
    for name in _RUNTIME:
        shutil.copyfile(pyodide / name, folder / "pyodide" / name)
    (folder / "contents.json").write_text(json.dumps(_contents()), encoding="utf-8")
    with TemporaryDirectory() as files:
        _copy_python(Path(files))
        command = ["node", str(_SOURCE / "compile.mjs"), str(pyodide), files]
        subprocess.run(command, check=True, timeout=300)
        shutil.make_archive(str(folder / "ptrain"), "zip", files)


def _contents() -> dict[str, object]:
    """Return the words of the completion, from the JSON Schema, and the built-in specs."""
    schema = json.loads((specs_folder() / "ptrain.schema.json").read_text(encoding="utf-8"))
    words = dict(keys_of_schema(schema))
    strategies = [*list_files("strategies")]
    words |= {"placement": strategies, "model.preset": [*list_files("models")]}
    words |= {"cluster.preset": [*list_files("clusters")]}
    keys = {
        row.place: {"values": words.get(row.place, []), "meaning": row.about}
        for row in iter_key_rows()
    }
    texts = {
        name: "".join(
            line
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
            if "yaml-language-server" not in line
        )
        for name, path in list_files(*SPEC_FOLDERS).items()
        if facts_from_shape(resolve_auto(load(name))) is not None  # else it needs torch
    }
    return {"keys": keys, "specs": texts, "first": FIRST}


def _copy_python(folder: Path) -> None:
    """Copy ptrain, its specs and PyYAML, all in Python, and the playground's functions."""
    shutil.copyfile(_SOURCE / "answer.py", folder / "answer.py")
    for source in (ROOT / "ptrain", Path(yaml.__file__).parent):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns(*_NOT_NEEDED))
    for file in (folder / "ptrain").rglob("*.py"):
        if _TORCH.search(file.read_text(encoding="utf-8")):
            file.unlink()  # it could not be imported
    no_specs = shutil.ignore_patterns(*_NO_SPECS)
    shutil.copytree(specs_folder(), folder / "ptrain" / "_specs", ignore=no_specs)


class _QuietHandler(SimpleHTTPRequestHandler):
    """The handler of a server for static files that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Temporarily serve a folder on this machine, and yield its address."""
    handler = partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def find_browser() -> str:
    """Return the path of Chromium; empty without one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), "")


def use(folder: Path, picture: Path | None = None) -> dict[str, Any]:
    """Use the playground of a folder in Chromium, by `check.mjs`, and return what happens.

    Args:
        folder: The folder that `write` wrote.
        picture: The file of a screenshot.
    """
    playwright = fetch_package(PLAYWRIGHT)
    with serve(folder) as address:
        command = ["node", str(_SOURCE / "check.mjs"), str(playwright), find_browser(), address]
        command += [str(picture)] if picture else []
        ended = subprocess.run(command, check=True, timeout=500, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def playground() -> str:
    """Return the table of the playground's size and of its seconds in Chromium."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        sent = sum(len(gzip.compress(path.read_bytes())) for path in files)
        seconds = use(folder)
    rows = [
        ("files of the page", f"{size / 1e6:.1f} MB"),
        ("the same, compressed by a server", f"{sent / 1e6:.1f} MB"),
        ("first figure after opening the page", f"{seconds['first_seconds']:.1f} s"),
        ("figures after a change", f"{seconds['answer_seconds']:.1f} s"),
        ("search of all placements of an 8B model on 8 GPUs", f"{seconds['select_seconds']:.0f} s"),
    ]
    return table([f"playground in Chromium on {os.cpu_count()} cores", "figure"], rows)


TABLES = {"playground": playground}

if __name__ == "__main__":
    write(Path(sys.argv[1]))
