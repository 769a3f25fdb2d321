"""The tensors of the built-in families as formulas: names, shapes, units, order of gradients.

P = 12LH² counts a gpt's matrices and nothing else; `remainder` names what it leaves out. Pure: no
torch. Tests compare every fact with the module itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.model import Family, ModelShape

_FP32 = 4  # bytes: buffers are fp32 (fp64 under compute fp64), whatever the layout

Shape = tuple[int, ...]
Table = tuple[tuple[str, Shape], ...]


def facts(shape: ModelShape, sequence: int, unit: UnitSize | None = None) -> ModelFacts:
    """Return what derivation knows of a built-in model that takes `sequence` tokens and is wrapped
    in units of this size (one block, where it is not given)."""
    block = _block(shape)
    names = tuple(f"blocks.{i}" for i in range(shape.layers))
    return ModelFacts(
        units=_units(unit or UnitSize(), names, block, _root(shape, sequence)),
        buffers=_buffers(shape, sequence),
        gradient_order=_gradient_order(shape, names, block),
    )


def remainder(shape: ModelShape, sequence: int) -> dict[str, int]:
    """P - 12LH² of a gpt with ffn = 4H, term by term, in elements."""
    unit, embeddings = unit_remainder(shape), shape.vocab * shape.hidden
    return {
        "biases": shape.layers * unit["biases"],
        "norms": shape.layers * unit["norms"] + 2 * shape.hidden,  # and the one after the blocks
        "embeddings": embeddings,
        "positions": sequence * shape.hidden,
        "head": 0 if shape.tied else embeddings,
    }


def unit_remainder(shape: ModelShape) -> dict[str, int]:
    """Return the elements of a gpt's block beside its 12H² of matrices (s_unit = 12H²·e)."""
    assert shape.family is Family.GPT and shape.ffn == 4 * shape.hidden
    return {
        "biases": 9 * shape.hidden,  # 4H in attention, 4H up, H down
        "norms": 4 * shape.hidden,  # two of them, weight and bias
    }


def _units(
    size: UnitSize, names: tuple[str, ...], block: Table, root: tuple[Table, Table]
) -> tuple[UnitFacts, ...]:
    """Inner before outer; an outer unit has what its inner ones leave. `root` are the tensors in
    front of the blocks and behind them."""
    ends = tuple(_tensors(table, "") for table in root)
    inner: list[UnitFacts] = []
    within = {name: _tensors(block, f"{name}.") for name in names}
    match size.kind:
        case UnitKind.BLOCK | UnitKind.BLOCKS:
            for start in range(0, len(names), size.count):
                group = names[start : start + size.count]
                tensors = tuple(tensor for name in group for tensor in within[name])
                inner.append(UnitFacts(modules=group, tensors=tensors))
        case UnitKind.SUB_BLOCK:
            for name in names:
                inner += _sub_units(name, block)
        case UnitKind.MODEL:
            whole = tuple(tensor for name in names for tensor in within[name])
            return (UnitFacts(modules=("",), tensors=(*ends[0], *whole, *ends[1])),)
        case kind:
            assert_never(kind)
    return (*inner, UnitFacts(modules=("",), tensors=(*ends[0], *ends[1])))


def _sub_units(name: str, block: Table) -> Iterator[UnitFacts]:
    """Attention and mlp are modules of modules: `attention.query.weight` lies two deep. The norms
    stay with the block."""
    by_part: dict[str, list[tuple[str, Shape]]] = {}
    for path, dims in block:
        part, _, rest = path.partition(".")
        by_part.setdefault(part if "." in rest else "", []).append((path, dims))
    left = by_part.pop("")
    for part, table in by_part.items():
        yield UnitFacts(modules=(f"{name}.{part}",), tensors=_tensors(tuple(table), f"{name}."))
    yield UnitFacts(modules=(name,), tensors=_tensors(tuple(left), f"{name}."))


def _tensors(table: Table, prefix: str) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(name=prefix + name, shape=dims) for name, dims in table)


def _block(shape: ModelShape) -> Table:
    match shape.family:
        case Family.LLAMA:
            return _llama_block(shape)
        case Family.GPT:
            return _gpt_block(shape)
        case family:
            assert_never(family)


def _llama_block(shape: ModelShape) -> Table:
    hidden, ffn, kv_hidden = shape.hidden, shape.ffn, shape.kv_heads * shape.head_dim
    return (
        ("attention_norm.weight", (hidden,)),
        ("attention.query.weight", (hidden, hidden)),
        ("attention.key.weight", (kv_hidden, hidden)),
        ("attention.value.weight", (kv_hidden, hidden)),
        ("attention.output.weight", (hidden, hidden)),
        ("mlp_norm.weight", (hidden,)),
        ("mlp.gate.weight", (ffn, hidden)),
        ("mlp.up.weight", (ffn, hidden)),
        ("mlp.down.weight", (hidden, ffn)),
    )


def _gpt_block(shape: ModelShape) -> Table:
    hidden, ffn = shape.hidden, shape.ffn
    return (
        *_weight_and_bias("attention_norm", (hidden,)),
        *_weight_and_bias("attention.query", (hidden, hidden)),
        *_weight_and_bias("attention.key", (hidden, hidden)),
        *_weight_and_bias("attention.value", (hidden, hidden)),
        *_weight_and_bias("attention.output", (hidden, hidden)),
        *_weight_and_bias("mlp_norm", (hidden,)),
        *_weight_and_bias("mlp.up", (ffn, hidden)),
        *_weight_and_bias("mlp.down", (hidden, ffn)),
    )


def _weight_and_bias(name: str, dims: Shape) -> Table:
    return ((f"{name}.weight", dims), (f"{name}.bias", dims[:1]))


def _root(shape: ModelShape, sequence: int) -> tuple[Table, Table]:
    """The tensors in front of the blocks, and those behind them."""
    embed = ("embed.weight", (shape.vocab, shape.hidden))
    head: Table = () if shape.tied else (("head.weight", (shape.vocab, shape.hidden)),)
    match shape.family:
        case Family.LLAMA:
            return (embed,), (("norm.weight", (shape.hidden,)), *head)
        case Family.GPT:
            positions = ("positions.weight", (sequence, shape.hidden))
            return (embed, positions), (*_weight_and_bias("norm", (shape.hidden,)), *head)
        case family:
            assert_never(family)


def _buffers(shape: ModelShape, sequence: int) -> tuple[tuple[str, int], ...]:
    match shape.family:
        case Family.LLAMA:
            table = sequence * (shape.head_dim // 2) * _FP32
            return (("cos_TK", table), ("sin_TK", table))
        case Family.GPT:
            return ()
        case family:
            assert_never(family)


def _gradient_order(shape: ModelShape, names: tuple[str, ...], block: Table) -> tuple[str, ...]:
    """Last used, first complete. A tied embedding is complete only where it was used first."""
    within = tuple(_completed(tuple(name for name, _ in block)))
    last: tuple[str, ...] = () if shape.tied else ("head.weight",)
    match shape.family:
        case Family.LLAMA:
            last, first = (*last, "norm.weight"), ["embed.weight"]
        case Family.GPT:
            last, first = (*last, "norm.weight", "norm.bias"), ["positions.weight", "embed.weight"]
        case family:
            assert_never(family)
    blocks = (f"{block_name}.{name}" for block_name in reversed(names) for name in within)
    return (*last, *blocks, *first)


def _completed(names: tuple[str, ...]) -> Iterator[str]:
    """Modules backwards. A linear layer's bias comes first, for its weight is transposed on the
    way; a norm hands over both at once, in the order of its arguments."""
    for module in reversed(dict.fromkeys(name.rpartition(".")[0] for name in names)):
        own = [name for name in names if name.rpartition(".")[0] == module]
        yield from own if module.endswith("norm") else reversed(own)
