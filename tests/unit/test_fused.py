"""Fused projections, head counts, dropout between column and row, and sequence shards: recognized
and rejected cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptrain.algebra.legality import require_runnable
from ptrain.axes.tensor.run.apply import held_order
from ptrain.errors import SpecError
from ptrain.models.initialize import build_model
from ptrain.models.parting import Projections
from ptrain.models.roles import module_roles
from ptrain.spec.load import load
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.placement import Role
from ptrain.spec.spec import Spec
from tests.models_from_outside import NANO_PLAN, conv, dropping, nano
from tests.models_fused import GROUPED_PLAN, early, grouped, shifting

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}


def spec_of(activations: str = "R", tp: int = 2, **tensor: Any) -> Spec:
    mapping: dict[str, Any] = {
        "name": "fused",
        "model": {"target": "tests.models_fused:grouped"},
        "mesh": {"tp": tp},
        "placement": {"tp": f"S,S,S,{activations}"},
        "batch": {"global": 2, "micro": 1, "sequence": 16},
        "tensor": tensor,
    }
    return require_runnable(load(mapping))


def refusal(module: nn.Module, spec: Spec) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        module_roles(module, spec)
    (fault,) = caught.value.faults
    return fault.place, fault.finding


def test_a_rank_holds_its_slice_of_each_projection():
    assert held_order([4, 2, 2], 2) == [0, 1, 4, 6, 2, 3, 5, 7]
    assert sorted(held_order([6, 3], 3)) == list(range(9))


@pytest.mark.parametrize(
    ("take", "lengths"),
    [
        (lambda y: y.split(4, dim=-1), (4, 4, 4)),
        (lambda y: y.split([6, 3, 3], dim=-1), (6, 3, 3)),
        (lambda y: y.chunk(2, dim=-1), (6, 6)),
        (lambda y: y.view(2, 5, 3, 2, 2).unbind(2), (4, 4, 4)),
        (lambda y: y.view(2, 5, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0), (4, 4, 4)),
        (lambda y: (y[..., :8], y[..., 8:]), (8, 4)),
        (lambda y: y.view(2, 5, 2, 6).chunk(3, dim=-1), ()),  # of each head
        (lambda y: (y.view(2, 5, 2, 6)[..., :2], y.view(2, 5, 2, 6)[..., 2:]), ()),  # rotated
        (lambda y: (y[:, :2], y[:, 2:]), ()),  # tokens
        (lambda y: (y[..., :4],), ()),  # what becomes of the others is not seen
        (lambda y: y.view(2, 5, 2, 6), ()),
    ],
)
def test_projections_are_recognized_by_how_a_model_splits_them(take, lengths):
    projections, output = Projections(), torch.zeros(2, 5, 12)
    projections.register_output("layer", output)

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            tensors = [result] if isinstance(result, torch.Tensor) else result
            projections.record_views([args[0]], tensors)
            return result

    with Seen():
        take(output)
    assert projections.projection_widths("layer") == lengths


def test_gpt2_is_sharded_without_a_plan_of_transformers():
    pytest.importorskip("transformers")
    spec = require_runnable(
        load(
            {
                "name": "gpt2",
                "model": {"hf": "gpt2", "config": GPT2},
                "mesh": {"tp": 2},
                "placement": "tp",
                "batch": {"global": 2, "micro": 1, "sequence": 16},
            }
        )
    )
    model = build_model(HuggingFaceModel(hf="gpt2", config=GPT2), sequence=16)
    roles, fusions = module_roles(model, spec)
    assert fusions == (("transformer.h.*.attn.c_attn", (32, 32, 32)),)
    by_name = dict(roles)
    assert by_name["transformer.h.*.attn.c_attn"] is Role.TRANSPOSED_COLUMN
    assert by_name["transformer.h.*.mlp.c_proj"] is Role.TRANSPOSED_ROW
    assert by_name["transformer.h.*.attn.split_size"] is Role.COUNT
    assert by_name["transformer.h.*.attn"] is Role.WHOLE_INPUT
    assert by_name["transformer.wte"] is Role.VOCABULARY  # tied to the head


def test_projections_may_be_of_unlike_lengths():
    _, fusions = module_roles(grouped(), spec_of())
    assert fusions == (("h.*.attn.qkv", (32, 16, 16)), ("h.*.mlp.gate_up", (64, 64)))


def test_an_unsplit_fused_column_is_rejected():
    plan = NANO_PLAN | {"transformer.h.*.mlp.up": "fused column"}
    place, finding = refusal(nano(), spec_of(plan=plan))
    assert place == "tensor.plan" and "h.0.mlp.up has the role fused column" in finding


def test_a_degree_divides_each_projection_and_each_count():
    with pytest.raises(SpecError) as caught:
        module_roles(nano(hidden=24, heads=2), spec_of(tp=4, plan=NANO_PLAN))
    assert [f.finding for f in caught.value.faults] == [
        "tp=4 does not divide transformer.h.*.attn.n_head: 2"
    ]
    plan = {name: word for name, word in GROUPED_PLAN.items() if word != "count"}
    place, finding = refusal(grouped(), spec_of(tp=32, plan=plan))
    assert place == "mesh.tp"
    assert finding == "tp=32 does not divide the projections of h.0.attn.qkv: 32, 16, 16"


def test_a_count_is_an_integer_of_a_module():
    plan = NANO_PLAN | {"transformer.h.*.attn.dropout": "count"}
    _, finding = refusal(nano(), spec_of(plan=plan))
    assert finding == "no integer attribute is named transformer.h.*.attn.dropout"


def test_a_count_that_two_patterns_mean_has_two_roles():
    plan = NANO_PLAN | {"transformer.h.0.attn.n_head": "count"}
    place, finding = refusal(nano(), spec_of(plan=plan))
    assert place == "tensor.plan"
    assert finding == "transformer.h.0.attn.n_head has two roles, count and count"


def test_a_counting_module_passes_its_input_to_its_columns_only():
    plan = NANO_PLAN | {"transformer.h.*.mlp.width": "count"}
    model = nano()
    for block in model.transformer["h"]:
        block.mlp.width = 32
        block.mlp.register_forward_pre_hook(lambda _, args: None)
        block.mlp.forward = lambda x, mlp=block.mlp: mlp.down(mlp.up(x)) + 0 * x.sum()
    _, finding = refusal(model, spec_of(plan=plan))
    assert "h.0.mlp has attributes with the role count" in finding


def test_dropout_is_followed():
    roles, _ = module_roles(dropping(), spec_of())
    assert dict(roles)["h.*.attn.q"] is Role.COLUMN


def test_a_local_mask_of_a_replicated_tensor_is_rejected():
    _, finding = refusal(early(), spec_of())
    assert "h.0.attn.drop" in finding and "draws one mask" in finding


def test_between_the_sub_blocks_norms_are_seen_to_be_on_slices_of_the_tokens():
    roles = dict(module_roles(grouped(), spec_of("S"))[0])
    assert [roles[f"h.*.{name}"] for name in ("ln_1", "ln_2")] == [Role.SHARED] * 2
    assert "ln_f" not in roles and roles["h.*"] is Role.BLOCK
    assert roles["h.0"] is Role.FIRST_BLOCK and roles["h.1"] is Role.LAST_BLOCK


@pytest.mark.parametrize(("model", "where"), [(shifting, "h.0.attn"), (conv, "h.0.mlp")])
def test_a_block_that_mixes_tokens_is_rejected_with_slices_of_them(model, where):
    place, finding = refusal(model(), spec_of("S"))
    assert place == "model.target"
    assert finding.startswith(f"{where} receives other values for a shard of the tokens")
    assert module_roles(model(), spec_of())[0]


def test_to_look_at_slices_changes_nothing():
    model = grouped()
    model.h[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    module_roles(model, spec_of("S"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training and model.h[1].training and not model.h[0].training
    assert not any(child._forward_pre_hooks or child._forward_hooks for child in model.modules())
