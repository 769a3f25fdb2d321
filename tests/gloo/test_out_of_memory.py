"""A rank with too little address space is explained by `ptrain why-oom`."""

from __future__ import annotations

import sys

import pytest

from ptrain.cli.main import main
from tests import jobs

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's"),
]

# Python imports `sitecustomize` at its start. Rank 1 gets 150 MiB of address space in addition to
# the space that it has with its model, of about 190 MiB that a step needs.
LIMIT = """
import os, resource, sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

NAME = "ptrain.train.failure_point"

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            observe = module.FailurePoint.observe_program
            def observe_and_limit(point, program):
                observe(point, program)
                pages = int(open("/proc/self/statm").read().split()[0])
                size = pages * os.sysconf("SC_PAGE_SIZE") + 150 * 2**20
                resource.setrlimit(resource.RLIMIT_AS, (size, size))
            module.FailurePoint.observe_program = observe_and_limit
        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Finder())
"""
BATCH = ("batch.micro=32", "batch.global=128", "batch.accumulate=2", "train.steps=2")


def test_a_rank_with_too_little_memory_is_explained(tmp_path, capsys):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(LIMIT, encoding="utf-8")
    words = ["train", "ddp", *BATCH, "--run-dir", "run"]
    with jobs.job(words, cwd=tmp_path, first=tmp_path / "first") as job:
        assert job.wait(90) == 3
    assert "ptrain why-oom" in job.error
    assert main(["why-oom", str(tmp_path / "run")]) == 0
    first, request, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Rank 1 ran out of memory in the ")
    assert " pass of micro-batch " in first and first.endswith("in step 1.")
    assert request.startswith("It requested ")
    assert any(line.startswith("changes that fit") for line in rest)
