"""`ptrain completion`: the completions in the installed shells."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ptrain.cli.completion import keys_of_schema
from ptrain.cli.main import VERBS, main
from ptrain.spec.check import iter_key_rows, schema
from ptrain.spec.names import SPEC_FOLDERS, list_files

# Shell code to run after the script, which prints the completions of a line.
COMPLETE = {
    "bash": 'COMP_LINE="$1" COMP_POINT=${#1}; _ptrain; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": """
        compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -rl -- "$@" }
        _files() { : }
        words=("${(@s: :)1}"); CURRENT=${#words}; _ptrain
    """,
    "fish": "complete -C $argv[1]",
}
START = {
    "bash": ["bash", "--norc", "-c"],
    "zsh": ["zsh", "-f", "-c"],
    "fish": ["fish", "--no-config", "-c"],
}
STUB = {"bash": "", "zsh": "compdef() { : }\n", "fish": ""}
SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(not shutil.which(shell), reason="not installed"))
    for shell in START
]


@pytest.fixture
def complete(capsys, tmp_path):
    def completed(shell: str, line: str) -> set[str]:
        assert main(["completion", shell]) == 0
        text = STUB[shell] + capsys.readouterr().out + COMPLETE[shell]
        words = [*START[shell], text, *([shell] if shell != "fish" else []), line]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.stderr == ""
        return set(ended.stdout.split())

    return completed


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_the_typed_prefix(shell, complete):
    assert complete(shell, "ptrain ") == set(VERBS)
    assert complete(shell, "ptrain pre") == {"predict"}
    assert complete(shell, "ptrain train ") == set(list_files(*SPEC_FOLDERS))
    assert complete(shell, "ptrain predict zero3 hsdp-f") == {"hsdp-full-optimizer"}
    assert complete(shell, "ptrain train zero3 mesh.dp_s") == {"mesh.dp_shard="}
    assert complete(shell, "ptrain predict --so") == {"--sort"}
    assert complete(shell, "ptrain predict --sort p") == {"peak"}
    assert complete(shell, "ptrain select llama3-8b --cluster h200") == {
        name for name in list_files("clusters") if name.startswith("h200")
    }
    assert complete(shell, "ptrain select llama3-8") == {"llama3-8b"}
    assert complete(shell, "ptrain specs sh") == {"show"}
    assert complete(shell, "ptrain completion z") == {"zsh"}
    assert complete(shell, "ptrain train --run-dir zer") == set()  # a folder: none is here


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_the_value_of_a_key(shell, complete):
    prefix = "" if shell == "bash" else "device="  # readline replaces the part after "="
    assert complete(shell, "ptrain train device=c") == {f"{prefix}cpu", f"{prefix}cuda"}
    prefix = "" if shell == "bash" else "model.preset="
    assert complete(shell, "ptrain train model.preset=llama3-8") == {f"{prefix}llama3-8b"}
    prefix = "" if shell == "bash" else "placement.dp_shard="
    assert f"{prefix}zero3" in complete(shell, "ptrain train placement.dp_shard=zer")


def test_the_keys_are_those_of_a_spec():
    offered = {place for place, _ in keys_of_schema(schema())}
    known = {row.place: row for row in iter_key_rows()}
    assert {place for place, row in known.items() if not row.is_section} <= offered
    shorthands = {place for place in offered if place in known and known[place].is_section}
    assert {"placement", "placement.dp_shard", "recompute"} <= shorthands


def test_a_script_is_printed_without_torch_in_three_tenths_of_a_second():
    code = (
        "import sys\nfrom ptrain.cli.main import main\nmain(['completion', 'bash'])\n"
        "sys.exit(bool({'torch', 'numpy', 'rich'} & {*sys.modules}))"
    )
    least = float("inf")
    for _ in range(5):  # CPU time, so that other work counts little
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        least = min(least, used)
    assert least < 0.3
