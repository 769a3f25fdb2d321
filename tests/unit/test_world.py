"""The device of a rank: all ranks of a node choose consistently."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import pytest
import torch

from ptrain.errors import SpecError
from ptrain.runtime.world import World, create_store


@pytest.fixture
def rank(monkeypatch):
    """A rank that a launcher started, up to its meeting with the others; returns what it chose."""
    started = {}
    monkeypatch.setattr(
        "ptrain.runtime.world._create_default_group", lambda *args: started.update(b=args[1])
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def join(number: int, *, num_local: int, num_gpus: int, device: str = "auto") -> tuple:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        for name, value in {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": num_local,
            "LOCAL_WORLD_SIZE": num_local,
            "MASTER_PORT": 29500,
        }.items():
            monkeypatch.setenv(name, str(value))
        return World.join(device=device).device, started["b"]

    return join


@pytest.mark.parametrize("num_gpus", [0, 1, 3])
def test_with_fewer_gpus_than_ranks_all_ranks_take_the_cpu_and_gloo(rank, num_gpus):
    chosen = {rank(number, num_local=4, num_gpus=num_gpus) for number in range(4)}
    assert chosen == {(torch.device("cpu"), "gloo")}


def test_with_enough_gpus_every_rank_takes_a_different_one_and_nccl(rank):
    chosen = [rank(number, num_local=2, num_gpus=2) for number in range(2)]
    assert chosen == [(torch.device("cuda", number), "nccl") for number in range(2)]


def test_a_requested_missing_gpu_is_rejected(rank):
    with pytest.raises(SpecError, match="found 1, but this is local rank 1"):
        rank(1, num_local=2, num_gpus=1, device="cuda")


def test_ranks_that_share_a_gpu_report_different_hosts_to_nccl(rank, monkeypatch):
    monkeypatch.setenv("PTRAIN_SHARE_GPUS", "1")
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.setenv(name, "")  # so that it is gone after the test
    hosts = set()
    for number in range(4):
        monkeypatch.delenv("NCCL_HOSTID")
        chosen = rank(number, num_local=4, num_gpus=2, device="cuda")
        assert chosen == (torch.device("cuda", number % 2), "nccl")
        hosts.add(os.environ["NCCL_HOSTID"])
    assert len(hosts) == 4


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_an_environment_that_holds_no_number_is_rejected_by_name(monkeypatch, name):
    good = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    for each, value in {**good, name: "one"}.items():
        monkeypatch.setenv(each, value)
    with pytest.raises(SpecError, match=f"{name}: must be an integer; got 'one'"):
        World.join()


def test_a_silent_process_at_the_rendezvous_port_is_reported_in_time():
    """It accepts the connection and answers nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="is silent"):
            create_store(*silent.getsockname(), timedelta(seconds=0.5), is_master=False)
        assert time.monotonic() - began < 1.5
