"""The output of ranks goes to the output of the command that started them, including notebook
cells."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from io import StringIO

from ptrain.output import standard_output
from ptrain.train.folder import RunFolder
from ptrain.train.launch import launch_ranks


def test_the_first_rank_prints_to_a_replaced_standard_output(tmp_path):
    (tmp_path / "logs").mkdir()
    with redirect_stdout(StringIO()) as printed:
        assert launch_ranks([], num_ranks=2, folder=RunFolder(tmp_path), module="this") == 0
    lines = printed.getvalue().splitlines()
    assert lines[0] == "The Zen of Python, by Tim Peters"
    assert lines.count(lines[0]) == 1, "the other rank prints to its log"
    assert lines[-1].startswith("Namespaces are one honking great idea")


def test_a_subprocess_keeps_its_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    with standard_output() as output:
        assert output is None


class ClosedCell(StringIO):
    """A notebook cell that accepts one line."""

    def write(self, text: str) -> int:
        if self.tell():
            raise ValueError("I/O operation on closed file")
        return super().write(text)


def test_who_prints_to_a_stream_that_is_gone_is_not_ended_by_it():
    with redirect_stdout(ClosedCell()) as printed, standard_output() as output:
        os.write(output, b"first\r\n")
        for _ in range(10_000):  # more than a pipe holds
            os.write(output, b"more than it takes\n")
    assert printed.getvalue() == "first\r\n"
