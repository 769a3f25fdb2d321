"""The screens of the command line: widths, colour, folded sentences, and the closing command."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ptrain.cli.progress import show_progress
from ptrain.report import screen
from ptrain.report.screen import (
    PIPE_WIDTH,
    command_line,
    fold_line,
    next_line,
    paint,
    print_screen,
    screen_width,
)
from ptrain.units import format_memory

ROOT = Path(__file__).parents[2]
SCREENS = (
    ("predict", "8b-zero3"),
    ("predict", "70b-dp", "--explain"),
    ("predict", "70b-3d"),
    ("predict", "8b-ddp", "8b-zero3"),
    ("predict", "8b-ddp", "8b-zero2", "8b-zero3", "8b-tp"),
    ("predict", "5d"),
    ("plan", "tp-zero3"),
    ("plan", "pp-zero-bubble"),
    ("compare", "zero2", "zero3"),
    ("specs",),
)


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_no_line_is_wider_than_the_screen_and_the_last_is_a_command(
    ptrain, monkeypatch, words, width
):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = ptrain(*words).splitlines()
    assert [line for line in lines if len(line) > width and "ptrain simulate" not in line] == []
    assert lines[-1].startswith("Next: ptrain ")


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("8b-zero3",), "Fits: 38.52 GiB of 74.12 GiB per GPU · 4.00 s/step · 65.5k tokens/s"),
        (("8b-ddp",), "Does not fit by 14.79 GiB: 88.91 GiB of 74.12 GiB per GPU"),
        (("zero3",), "Fits: 19.46 MiB of 11.71 GiB per rank"),
        (("70b-3d",), "Fits: 64.81 GiB of 74.12 GiB per GPU"),
    ],
)
def test_the_answer_is_the_second_line(ptrain, monkeypatch, words, answer, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert ptrain("predict", *words).splitlines()[1].startswith(answer)


def test_theory_is_printed_on_demand(ptrain):
    plain, explained = (ptrain("predict", "70b-zero2", *more) for more in ((), ("--explain",)))
    for words in ("why exact is not paper", "figures that a column does not define", "  paper "):
        assert words in explained and words not in plain


def test_columns_state_the_width_and_a_pipe_has_a_fixed_one(monkeypatch):
    assert screen_width() == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "62")
    assert screen_width() == 62
    monkeypatch.setenv("COLUMNS", "wide")
    assert screen_width() == PIPE_WIDTH


def test_a_pipe_gets_sentences_on_one_line(capsys, monkeypatch):
    sentence = "note: " + 30 * "word "
    print_screen(sentence)
    assert capsys.readouterr().out.rstrip() == sentence.rstrip()
    monkeypatch.setenv("COLUMNS", "80")
    print_screen(sentence)
    first, second = capsys.readouterr().out.splitlines()
    assert len(first) <= 80 and second.startswith("  word")


def test_a_line_is_folded_between_its_parts_and_a_command_is_not():
    assert fold_line("Fits: 1 GiB · 2 s/step · 3 tokens/s", 24) == [
        "Fits: 1 GiB · 2 s/step",
        "  3 tokens/s",
    ]
    assert fold_line("  to measure the peak: ptrain simulate zero3", 20) == [
        "  to measure the peak: ptrain simulate zero3"
    ]
    assert len(fold_line("no time: `ptrain calibrate` measures those of this machine", 40)) == 2
    step = "step 10/50  loss 3.6787  |g| 1.80  0.27 s  peak 19.46 MiB  traffic 19.32 MB"
    first, second = fold_line(step, 50)  # never between a number and its unit
    assert (first[-6:], second) == ("0.27 s", "  peak 19.46 MiB  traffic 19.32 MB")
    assert len(fold_line("sync     gradients after every micro-batch, then resharded", 40)) == 2


def test_the_next_command_lets_code_be_imported_if_this_one_did():
    assert command_line("train", ["a b.yaml"]) == "ptrain train 'a b.yaml'"
    assert command_line("train", ["a.yaml"], allow_import=True) == (
        "ptrain train a.yaml --allow-import"
    )


def test_the_next_command_is_the_first_that_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert next_line("ptrain train a-long-name-of-a-spec", "ptrain specs") == "Next: ptrain specs"
    assert next_line("ptrain train zero3", "ptrain specs") == "Next: ptrain train zero3"


@pytest.mark.parametrize(
    ("text", "painted"),
    [
        ("Fits: 1 GiB", "\x1b[1;32mFits\x1b[0m: 1 GiB"),
        ("Fits, but tight: 1 GiB", "\x1b[1;33mFits, but tight\x1b[0m: 1 GiB"),
        ("verdict: fails (1 of 2)", "\x1b[1;31mverdict: fails\x1b[0m (1 of 2)"),
        ("spec.yaml:1: error: mesh", "spec.yaml:1: \x1b[1;31merror\x1b[0m: mesh"),
        ("8b-ddp  no  91 GiB", "8b-ddp  \x1b[1;31mno\x1b[0m  91 GiB"),
        ("no pp: one node fits", "no pp: one node fits"),
    ],
)
def test_verdicts_answers_and_errors_have_colour_on_a_terminal_alone(monkeypatch, text, painted):
    assert paint(text, Terminal()) == painted
    assert paint(text, io.StringIO()) == text
    assert paint(text, None) == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint(text, Terminal()) == text


def test_a_command_on_a_terminal_is_as_wide_as_it_and_in_colour():
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    termios = pytest.importorskip("termios")
    termios.tcsetwinsize(child, (40, 70))
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "ptrain", "predict", "8b-zero3"]
    ended = subprocess.run(
        command, cwd=ROOT, stdout=child, env=environment | {"TERM": "xterm"}, check=True
    )
    os.close(child)
    text = os.read(parent, 100_000).decode()
    os.close(parent)
    assert ended.returncode == 0 and "\x1b[1;32mFits\x1b[0m: " in text
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= 70


def test_progress_is_drawn_on_a_terminal_once_it_takes_long(monkeypatch):
    monkeypatch.setattr("ptrain.cli.progress._SILENT", 0.01)
    for stream, is_drawn in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress("searching") as step:
            step(1, 4, "deriving")
            time.sleep(0.6)
        assert ("deriving" in stream.getvalue()) is is_drawn


def test_progress_that_is_over_soon_imports_no_rich():
    code = (
        "import sys, ptrain.cli.progress as p\n"
        "sys.stderr.isatty = lambda: True\n"
        "with p.show_progress('x') as step: step(1, 2)\n"
        "print('rich' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 * 2**30, "80 GiB"), (2**45, "32 TiB")],
)
def test_memory_has_binary_units(size, text):
    assert format_memory(size) == text


def test_a_screen_without_colour_or_width_equals_the_functions_result(capsys):
    assert screen.screen_width() == PIPE_WIDTH
    print_screen("a", "b")
    assert capsys.readouterr().out == "a\nb\n"
