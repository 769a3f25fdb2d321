"""No name, path, message or log line controls the terminal that shows it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ptrain.cli.main import main
from ptrain.report.screen import escape_controls, paint, print_lines, print_screen

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b1A\rb\x7f\u202ec"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


class Terminal:
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_control_codes_are_written_as_numbers():
    shown = escape_controls(f"{HOSTILE}\tä\n")
    assert shown.endswith("\\u007f\\u202ec\tä\n") and not CONTROLS.search(shown)
    assert json.loads(f'"{escape_controls(HOSTILE)}"') == HOSTILE


@pytest.mark.parametrize("show", [print_lines, print_screen])
def test_screens_have_no_control_codes(show: Callable[[str], None], capsys: Any):
    show(f"Fits: {HOSTILE}")
    assert not CONTROLS.search(capsys.readouterr().out)


def test_colour_is_added_to_escaped_text():
    shown = paint(f"error: {HOSTILE}", Terminal())  # type: ignore[arg-type]
    assert shown.startswith("\x1b[1;31merror\x1b[0m: a\\u001b]0;")


@pytest.mark.parametrize(
    "words",
    [
        ["predict", f"{HOSTILE}.yaml"],
        ["predict", "zero3", f"{HOSTILE}=1"],
        ["predict", "zero3", f"model.preset={HOSTILE}"],
        ["train", "zero3", "--resume", HOSTILE],
        ["train", "zero3", f"--{HOSTILE}"],
        [HOSTILE],
        ["tokenize", f"{HOSTILE}.txt", "--tokenizer", "bytes", "--out", "a.npy"],
        ["tokenize", "a.txt", "--tokenizer", HOSTILE, "--out", "a.npy"],
        ["export", HOSTILE, "--to", "out"],
        ["compare", HOSTILE, "zero3"],
        ["help", HOSTILE],
    ],
    ids=lambda words: words[0] if words[0] != HOSTILE else "command",
)
def test_errors_have_no_control_codes(
    words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    try:
        assert main(words)
    except SystemExit as error:
        assert error.code
    captured = capsys.readouterr()
    assert not CONTROLS.search(captured.out + captured.err)


def test_a_spec_with_control_codes_prints_none(tmp_path: Path, capsys: Any):
    (tmp_path / "a.yaml").write_text(f'name: "{escape_controls(HOSTILE)}"\nmodel: {{preset: x}}\n')
    assert main(["predict", str(tmp_path / "a.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.err and not CONTROLS.search(captured.out + captured.err)


def test_logs_have_no_control_codes(tmp_path: Path):
    torch_half = pytest.importorskip("ptrain.train.journal")
    formatter = torch_half._EscapingFormatter("%(message)s")
    record = logging.LogRecord("ptrain", logging.INFO, "", 0, HOSTILE, None, None)
    assert not CONTROLS.search(formatter.format(record))
