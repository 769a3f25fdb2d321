"""A training is predicted with the kernels of the GPU that it runs on."""

import pytest
import torch

from ptrain.spec.load import load
from ptrain.train.session import replace_device


@pytest.mark.parametrize("cluster", ["cluster.preset=laptop", "cluster.preset=a100-8"])
def test_the_present_gpu_determines_the_capability_for_any_cluster(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = replace_device(load("zero3", (cluster,)).spec, torch.device("cuda", 0))
    assert (on_gpu.device, on_gpu.sm, on_gpu.is_for_cuda) == ("cuda", 90, True)


def test_ranks_on_processors_leave_the_cluster_as_it_is() -> None:
    spec = load("zero3", ("cluster.preset=a100-8",)).spec
    on_cpu = replace_device(spec, torch.device("cpu"))
    assert (on_cpu.device, on_cpu.cluster) == ("cpu", spec.cluster)
