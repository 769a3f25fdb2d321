"""The facts that `ptrain doctor` prints are torch's."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from ptrain.cli.doctor import TorchFacts, print_torch_facts


def test_a_process_prints_what_its_torch_finds(capsys):
    print_torch_facts()
    facts = TorchFacts(**json.loads(capsys.readouterr().out))
    assert len(facts.gpus) == torch.cuda.device_count()
    assert ("gloo" in facts.backends, "nccl" in facts.backends) == (
        dist.is_gloo_available(),
        dist.is_nccl_available(),
    )
    assert facts.toolkit == (torch.version.cuda or torch.version.hip or "")
    assert facts.error == ""
