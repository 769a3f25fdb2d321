"""The behavior of FSDP2 in `axes.data.fsdp2` is compared with the installed torch's source; the
replay tests check the resulting bytes."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from ptrain import installed
from ptrain.axes.data import fsdp2
from ptrain.installed import torch_minor
from ptrain.version import REFERENCE_TORCH, TESTED_TORCH

GROUP, PARAM = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam


def test_of_every_torch_for_which_exact_is_claimed_habits_are_known():
    assert set(fsdp2.BEHAVIORS) == set(TESTED_TORCH)


def test_a_buffer_is_held_if_a_local_name_outlives_the_next_copy():
    names_it = "prev_all_gather_state" in inspect.getsource(GROUP.wait_for_unshard)
    assert fsdp2.fsdp2_behavior().holds_buffer is names_it, (
        f"torch {torch.__version__}: FSDPParamGroup.wait_for_unshard names the buffer before"
    )


def test_the_last_gradient_is_referenced_if_the_loop_is_in_post_backward():
    loops = "unsharded_grads.append" in inspect.getsource(GROUP.post_backward)
    assert fsdp2.fsdp2_behavior().names_last_gradient is loops, (
        f"torch {torch.__version__}: FSDPParamGroup.post_backward collects gradients in a loop"
    )


def test_gradients_are_cast_on_arrival_where_no_parameter_does_it_later():
    is_later = hasattr(PARAM, "to_accumulated_grad_if_needed")
    assert fsdp2.fsdp2_behavior().casts_on_arrival is not is_later, (
        f"torch {torch.__version__}: FSDPParam.to_accumulated_grad_if_needed"
    )


def test_a_unit_without_gradients_awaits_a_reduction_that_precedes_the_check():
    source = inspect.getsource(GROUP.post_backward)
    waits_before = source.index("reduce_scatter_state") < source.index("_with_grad) == 0")
    assert fsdp2.fsdp2_behavior().waits_without_gradients is waits_before, (
        f"torch {torch.__version__}: FSDPParamGroup.post_backward"
    )


def test_bytes_are_kept_only_if_a_cast_leaves_out_other_dtypes_than_floating_point():
    leaves_out = "is_floating_point" in inspect.getsource(PARAM.init_dtype_attrs)
    assert leaves_out or not fsdp2.fsdp2_behavior().keeps_bytes, (
        f"torch {torch.__version__}: FSDPParam.init_dtype_attrs"
    )


@pytest.mark.parametrize("minor", ["", "2.10", "2.16", "a branch"])
def test_without_a_torch_that_is_known_the_tables_torch_is_counted(minor, monkeypatch):
    monkeypatch.setattr(installed, "torch_minor", lambda: minor)
    assert fsdp2.fsdp2_behavior() is fsdp2.BEHAVIORS[REFERENCE_TORCH]


def test_the_installed_torch_is_counted_where_exact_is_claimed_for_it():
    assert installed.counted_torch() == torch_minor()
