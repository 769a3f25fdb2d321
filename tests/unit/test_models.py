"""The built-in models against independent references, in fp64 unless precision is the subject."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.errors import PtrainError
from ptrain.models.cross_entropy import IGNORED, token_loss_sum
from ptrain.models.initialize import build_model, cast_module, initialize
from ptrain.models.transformer import Transformer, apply_rotary
from ptrain.spec.model import ModelShape
from tests.pure.build import ODD_SHAPE
from tests.unit.shapes import SHAPES, SMALL_GPT

SEQUENCE = 12
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def real(shape: ModelShape, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> nn.Module:
    """A model with weights large enough that no part of it hides behind the residual stream."""
    module = build_model(shape, sequence=SEQUENCE)
    cast_module(module, dtype)
    initialize(module, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * noise.to(dtype))
    return module


def tokens_of(shape: ModelShape, samples: int = 2, tokens: int = SEQUENCE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocab, (samples, tokens), generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_have_one_row_per_token_in_the_models_dtype(shape, dtype):
    logits_BTV = real(shape, dtype)(tokens_of(shape, samples=3, tokens=7))
    assert logits_BTV.shape == (3, 7, shape.vocab)
    assert logits_BTV.dtype is dtype


@pytest.mark.parametrize("shape", SHAPES)
def test_no_tensor_of_an_fp64_forward_is_narrower_than_fp64(shape):
    module, seen = real(shape), set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple | list) else [result]
            seen.update(
                output.dtype
                for output in outputs
                if isinstance(output, Tensor) and output.is_floating_point()
            )
            return result

    rows = tokens_of(shape)
    with Watch():
        token_loss_sum(module(rows), rows).backward()
    assert seen == {torch.float64}


@pytest.mark.parametrize("shape", SHAPES)
def test_fp64_weights_are_the_fp32_weights(shape):
    wide, narrow = build_model(shape, sequence=SEQUENCE), build_model(shape, sequence=SEQUENCE)
    cast_module(wide, torch.float64)
    initialize(wide, 3)
    initialize(narrow, 3)
    for (name, ours), theirs in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(ours, theirs.double()), name


@pytest.mark.parametrize("shape", SHAPES)
def test_a_logit_depends_on_no_later_token(shape):
    module, rows = real(shape), tokens_of(shape)
    changed = rows.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % shape.vocab
    before, after = module(rows), module(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5], after[:, 5]).any(-1).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_logit_depends_on_every_earlier_token(shape):
    module, rows = real(shape), tokens_of(shape, samples=1)
    last = module(rows)[0, -1]
    for position in range(SEQUENCE):
        changed = rows.clone()
        changed[0, position] = (changed[0, position] + 1) % shape.vocab
        assert not torch.allclose(module(changed)[0, -1], last, rtol=0, atol=1e-9), position


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shorter_input_gives_the_logits_of_a_prefix(shape):
    module, rows = real(shape), tokens_of(shape)
    torch.testing.assert_close(module(rows[:, :5]), module(rows)[:, :5])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_parameter_gets_a_gradient(shape):
    module, rows = real(shape), tokens_of(shape)
    token_loss_sum(module(rows), rows).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("shape", [ODD_SHAPE, replace(ODD_SHAPE, tied=True, kv_heads=3)])
def test_llama_equals_its_equations(shape):
    module, rows = real(shape), tokens_of(shape)
    torch.testing.assert_close(module(rows), llama_by_hand(module, shape, rows))


def llama_by_hand(module: nn.Module, shape: ModelShape, rows: Tensor) -> Tensor:
    """The published equations, RoPE as a product of complex numbers and softmax written out."""
    w = dict(module.named_parameters())
    x = w["embed.weight"][rows]
    for i in range(shape.layers):
        block = {name.removeprefix(f"blocks.{i}."): p for name, p in w.items()}
        y = F.rms_norm(x, (shape.hidden,), block["attention_norm.weight"], eps=1e-5)
        x = x + attention_by_hand(block, shape, y) @ block["attention.output.weight"].T
        y = F.rms_norm(x, (shape.hidden,), block["mlp_norm.weight"], eps=1e-5)
        gate, up = y @ block["mlp.gate.weight"].T, y @ block["mlp.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ block["mlp.down.weight"].T
    x = F.rms_norm(x, (shape.hidden,), w["norm.weight"], eps=1e-5)
    return x @ (w["embed.weight"] if shape.tied else w["head.weight"]).T


def attention_by_hand(block: dict[str, Tensor], shape: ModelShape, y: Tensor) -> Tensor:
    num_tokens, heads = y.shape[1], []
    later = torch.ones(num_tokens, num_tokens).triu(1).bool()
    for head in range(shape.heads):
        group = head * shape.kv_heads // shape.heads
        q = turned_by_hand(y @ rows_of_head(block["attention.query.weight"], shape, head).T)
        k = turned_by_hand(y @ rows_of_head(block["attention.key.weight"], shape, group).T)
        v = y @ rows_of_head(block["attention.value.weight"], shape, group).T
        scores = q @ k.transpose(-1, -2) / math.sqrt(shape.head_dim)
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v)
    return torch.cat(heads, dim=-1)


def rows_of_head(weight: Tensor, shape: ModelShape, head: int) -> Tensor:
    return weight[head * shape.head_dim : (head + 1) * shape.head_dim]


def turned_by_hand(x: Tensor) -> Tensor:
    num_tokens, half = x.shape[1], x.shape[2] // 2
    powers = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(num_tokens, dtype=torch.float64)[:, None] * powers
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_a_rotated_product_depends_on_the_distance_of_its_positions_only():
    module = real(ODD_SHAPE)
    assert isinstance(module, Transformer)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 14, generator=generator, dtype=torch.float64)
    q, k = (x.expand(1, SEQUENCE, 1, 14) for x in (q, k))
    q, k = (apply_rotary(x, module.cos_TK, module.sin_TK)[0, :, 0] for x in (q, k))
    products = q @ k.T
    for distance in range(SEQUENCE):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_equal_repeated_key_value_heads(kv_heads):
    shape = replace(ODD_SHAPE, hidden=56, heads=4, kv_heads=kv_heads)
    grouped, whole = real(shape), build_model(replace(shape, kv_heads=4), sequence=SEQUENCE)
    cast_module(whole, torch.float64)
    state = grouped.state_dict()
    for name in state:
        if "attention.key" in name or "attention.value" in name:
            heads = state[name].unflatten(0, (kv_heads, -1))
            state[name] = heads.repeat_interleave(4 // kv_heads, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    rows = tokens_of(shape)
    torch.testing.assert_close(grouped(rows), whole(rows))


@pytest.mark.parametrize("shape", [SMALL_GPT, replace(SMALL_GPT, tied=False, ffn=77)])
def test_gpt_equals_torchs_encoder_layers(shape):
    module, rows = real(shape), tokens_of(shape)
    w = dict(module.named_parameters())
    x = w["embed.weight"][rows] + w["positions.weight"]
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()
    for i in range(shape.layers):
        x = encoder_layer(module.get_submodule(f"blocks.{i}"), shape)(x, src_mask=mask)
    x = F.layer_norm(x, (shape.hidden,), w["norm.weight"], w["norm.bias"])
    logits = x @ (w["embed.weight"] if shape.tied else w["head.weight"]).T
    torch.testing.assert_close(module(rows), logits)


def encoder_layer(block: nn.Module, shape: ModelShape) -> nn.TransformerEncoderLayer:
    """torch's layer with the weights of one of our blocks."""
    layer = nn.TransformerEncoderLayer(
        shape.hidden,
        shape.heads,
        shape.ffn,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    w = dict(block.named_parameters())
    state = {}
    for kind in ("weight", "bias"):
        projections = [w[f"attention.{name}.{kind}"] for name in ("query", "key", "value")]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(projections)
        state[f"self_attn.out_proj.{kind}"] = w[f"attention.output.{kind}"]
        state[f"linear1.{kind}"] = w[f"mlp.up.{kind}"]
        state[f"linear2.{kind}"] = w[f"mlp.down.{kind}"]
        state[f"norm1.{kind}"] = w[f"attention_norm.{kind}"]
        state[f"norm2.{kind}"] = w[f"mlp_norm.{kind}"]
    layer.load_state_dict(state)
    return layer.train()  # evaluation would take another path than the plain operators


def test_dropout_acts_in_training_only():
    module, rows = real(replace(SMALL_GPT, dropout=0.5)), tokens_of(SMALL_GPT)
    torch.manual_seed(0)
    assert not torch.equal(module(rows), module(rows))
    module.eval()
    assert torch.equal(module(rows), module(rows))
    torch.testing.assert_close(module(rows), real(SMALL_GPT)(rows))


@pytest.mark.parametrize("shape", [ODD_SHAPE, SMALL_GPT])
def test_bf16_follows_fp64_within_its_rounding(shape):
    """bf16 rounds to 2^-9 relative; the error of the residual stream grows with its roundings,
    at most 2 per block and a handful at the ends, each of the size of the stream."""
    exact = build_model(shape, sequence=SEQUENCE)
    cast_module(exact, torch.bfloat16)
    initialize(exact, 0)
    rounded = exact(tokens_of(shape))
    cast_module(exact, torch.float64)
    logits = exact(tokens_of(shape))
    error = (rounded.double() - logits).norm() / logits.norm()
    assert error < (2 * shape.layers + 6) * 2**-9


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_the_sum_of_cross_entropies_in_at_least_fp32(dtype):
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 0, 1, 2]])
    loss = token_loss_sum(logits, targets)
    probabilities = logits.double().softmax(-1).gather(-1, targets[..., None])
    assert loss.dtype is torch.promote_types(dtype, torch.float32)
    rounding = torch.finfo(loss.dtype).eps * logits.numel()
    assert loss.item() == pytest.approx(-probabilities.log().sum().item(), rel=rounding)


def test_an_ignored_target_counts_for_nothing():
    logits = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    whole = token_loss_sum(logits[:, :2], torch.tensor([[1, 2]]))
    assert token_loss_sum(logits, torch.tensor([[1, 2, IGNORED]])) == whole


@pytest.mark.parametrize(
    ("shape", "finding"),
    [
        (replace(ODD_SHAPE, heads=4), "does not divide hidden=42"),
        (replace(ODD_SHAPE, kv_heads=2), "kv_heads=2 does not divide heads=3"),
        (replace(ODD_SHAPE, heads=2, kv_heads=1), "rotary embeddings need an even number"),
        (replace(SMALL_GPT, head_bias=True), "a tied head uses the embedding"),
    ],
)
def test_an_impossible_shape_is_rejected_with_a_fix(shape, finding):
    with pytest.raises(PtrainError, match=finding):
        build_model(shape, sequence=SEQUENCE)
