"""Run the notebooks and save their output: `python docs/tools/notebooks.py [NOTEBOOK ...]`.

It needs the extra `notebooks`. Cells run in an empty folder, with two ranks at most.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
_ROOT = FOLDER.parents[1]
_SECONDS = 240  # for one cell
_LAUNCHER = re.compile(r"^(?:W\d{4} |\[W?rank|\[Gloo\]|\*{5,}|Setting OMP_).*\n", re.MULTILINE)


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook, and return it with its output.

    Raises:
        CellExecutionError: If a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", "")))
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(paths)}
    with TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=_SECONDS, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        outputs = cell.get("outputs", [])
        # One text per cell: how a stream is cut into messages depends on timing.
        text = "".join(output.text for output in outputs if output.get("name") == "stdout")
        text = _LAUNCHER.sub("", text).replace("\r\n", "\n")
        others = [output for output in outputs if output.output_type != "stream"]
        streams = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        if "outputs" in cell:
            cell.outputs, cell.execution_count = [*streams, *others], None
    notebook.metadata.pop("language_info", None)
    return notebook


def main() -> None:
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(path.name)


if __name__ == "__main__":
    main()
