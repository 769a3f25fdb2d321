"""The tensors of built-in models as formulas: names, shapes, units, and the order of gradients.

This module is pure and does not import torch. Tests compare every fact with the module itself.

It also has the roles of a built-in model's modules on the tensor axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import assert_never

from ptrain.facts.model import LAST_UNIT, ExpertLayers, ModelFacts, TensorFacts, UnitFacts
from ptrain.spec.block import Bias, Positions
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import EXPERT_AXES, Role, Roles
from ptrain.spec.precision import Quantization
from ptrain.spec.spec import Spec

EXPERTS = "experts"  # the module of a block that has all of its experts
ADAPTER = ("lora_A", "lora_B")  # the modules of an adapter, first to last
LOCAL = "window_"  # prefix of the tables that only layers with a window use
_MATRIX = 2  # dimensions
_BYTE_VALUES = 2**8 * 2 * 4  # bytes of the fp32 values of two NF4 codes
_FP32, _INT64 = 4, 8  # bytes; buffers of reals are fp32 in every layout (fp64 with compute fp64)

Shape = tuple[int, ...]
Table = tuple[tuple[str, Shape], ...]


@lru_cache(maxsize=2**5)  # a search for changes that fit varies everything except the model
def facts(
    shape: ModelShape,
    sequence: int,
    unit: UnitSize | None = None,
    apart: tuple[str, ...] = (),
) -> ModelFacts:
    """Return the facts of a built-in model.

    Args:
        shape: The model.
        sequence: The number of tokens of a sample, for learned positions and tables.
        unit: The size of a unit; by default one block.
        apart: Modules that are separate units, such as experts.
    """
    blocks = {f"blocks.{layer}": _block_tensors(shape, layer) for layer in range(shape.layers)}
    if (rank := shape.lora_rank) is not None:
        blocks = {name: tuple(_with_adapters(table, rank)) for name, table in blocks.items()}
    units = _make_units(unit or UnitSize(), blocks, _root_tensors(shape, sequence))
    if rank is not None:
        units = tuple(replace(own, tensors=_freeze_base(own.tensors)) for own in units)
    return ModelFacts(
        units=tuple(part for unit_facts in units for part in _separate_units(unit_facts, apart))
        if apart
        else units,
        buffers=_buffer_sizes(shape, sequence),
        gradient_order=tuple(
            name for name in _gradient_order(shape, blocks) if rank is None or is_of_adapter(name)
        ),
    )


def expert_modules(spec: Spec) -> tuple[str, ...]:
    """Return the modules that hold each layer's experts, if ranks have different experts."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or not spec.is_cut_over(EXPERT_AXES):
        return ()
    layers = filter(shape.has_experts, range(shape.layers))
    return tuple(f"blocks.{layer}.mlp.{EXPERTS}" for layer in layers)


def expert_layers(spec: Spec) -> ExpertLayers | None:
    """Return the layers with experts of a built-in model, if ranks have different experts."""
    shape, modules = spec.model, expert_modules(spec)
    if not modules or not isinstance(shape, ModelShape) or shape.experts is None:
        return None
    return ExpertLayers(
        modules=modules,
        number=shape.experts,
        chosen=shape.experts_per_token,
        features=shape.hidden,
    )


def _separate_units(unit: UnitFacts, apart: Sequence[str]) -> Iterator[UnitFacts]:
    """Yield the units of separate modules within a unit, then the rest of the unit."""
    left = unit.tensors
    for name in apart:
        tensors = tuple(tensor for tensor in left if tensor.name.startswith(f"{name}."))
        if tensors:
            yield UnitFacts(modules=(name,), tensors=tensors)
            left = tuple(tensor for tensor in left if tensor not in tensors)
    yield replace(unit, tensors=left) if len(left) < len(unit.tensors) else unit


def _make_units(
    size: UnitSize, blocks: Mapping[str, Table], root: tuple[Table, Table]
) -> tuple[UnitFacts, ...]:
    """Return the units of a model, inner before outer; an outer unit has the remaining tensors.

    Args:
        size: The size of a unit.
        blocks: The tensors of each block by name.
        root: The tensors before the blocks and after them.
    """
    ends = tuple(_tensor_facts(table, "") for table in root)
    inner: list[UnitFacts] = []
    names = tuple(blocks)
    within = {name: _tensor_facts(block, f"{name}.") for name, block in blocks.items()}
    match size.kind:
        case UnitKind.BLOCK | UnitKind.BLOCKS:
            for start in range(0, len(names), size.count):
                group = names[start : start + size.count]
                tensors = tuple(tensor for name in group for tensor in within[name])
                inner.append(UnitFacts(modules=group, tensors=tensors))
        case UnitKind.SUB_BLOCK:
            for name, block in blocks.items():
                inner += _sub_units(name, block)
        case UnitKind.ENDS:
            first = tuple(tensor for tensor in ends[0] if tensor.name.startswith("embed."))
            inner = [
                UnitFacts(modules=("embed",), tensors=first),
                *(UnitFacts(modules=(name,), tensors=within[name]) for name in names),
                UnitFacts(modules=LAST_UNIT, tensors=ends[1]),
            ]
            ends = tuple(tensor for tensor in ends[0] if tensor not in first), ()
        case UnitKind.MODEL:
            tensors_of_blocks = tuple(tensor for name in names for tensor in within[name])
            return (UnitFacts(modules=("",), tensors=(*ends[0], *tensors_of_blocks, *ends[1])),)
        case kind:
            assert_never(kind)
    return (*inner, UnitFacts(modules=("",), tensors=(*ends[0], *ends[1])))


def _sub_units(name: str, block: Table) -> Iterator[UnitFacts]:
    """Yield the units of a block's attention and mlp, then the block's unit with its norms.

    Attention and mlp contain modules: `attention.query.weight` is two levels deep.
    """
    by_part: dict[str, list[tuple[str, Shape]]] = {}
    for path, dims in block:
        part, _, rest = path.partition(".")
        by_part.setdefault(part if "." in rest else "", []).append((path, dims))
    left = by_part.pop("")
    for part, table in by_part.items():
        yield UnitFacts(
            modules=(f"{name}.{part}",), tensors=_tensor_facts(tuple(table), f"{name}.")
        )
    yield UnitFacts(modules=(name,), tensors=_tensor_facts(tuple(left), f"{name}."))


def _tensor_facts(table: Table, prefix: str) -> tuple[TensorFacts, ...]:
    """Return the facts of a table's tensors."""
    return tuple(TensorFacts(name=prefix + name, shape=dims) for name, dims in table)


def _freeze_base(tensors: Iterable[TensorFacts]) -> tuple[TensorFacts, ...]:
    """Return the tensors of a model with adapters, all others of which are frozen."""
    return tuple(t if is_of_adapter(t.name) else t._replace(is_frozen=True) for t in tensors)


def _block_tensors(shape: ModelShape, layer: int) -> Table:
    """Return the tensors of a block."""
    hidden = shape.hidden
    has_post, has_own = shape.post_norm, not shape.parallel
    return (
        *_norm_tensors(shape, "attention_norm", hidden),
        *(_latent_attention_tensors(shape) if shape.is_latent else _attention_tensors(shape)),
        *(_norm_tensors(shape, "attention_post_norm", hidden) if has_post else ()),
        *(_norm_tensors(shape, "mlp_norm", hidden) if has_own else ()),
        *(
            _moe_tensors(shape)
            if shape.has_experts(layer)
            else _feed_forward_tensors(shape, "mlp", shape.ffn)
        ),
        *(_norm_tensors(shape, "mlp_post_norm", hidden) if has_post else ()),
    )


def _attention_tensors(shape: ModelShape) -> Table:
    """Return the tensors of attention."""
    hidden, head_dim, all_have_bias = shape.hidden, shape.head_dim, shape.bias is Bias.ALL
    qkv_has_bias = shape.bias is not Bias.NONE
    return (
        *_linear_tensors("attention.query", shape.query_width, hidden, has_bias=qkv_has_bias),
        *(_norm_tensors(shape, "attention.query_norm", head_dim) if shape.qk_norm else ()),
        *_linear_tensors("attention.key", shape.kv_width, hidden, has_bias=qkv_has_bias),
        *(_norm_tensors(shape, "attention.key_norm", head_dim) if shape.qk_norm else ()),
        *_linear_tensors("attention.value", shape.kv_width, hidden, has_bias=qkv_has_bias),
        *_linear_tensors("attention.output", hidden, shape.query_width, has_bias=all_have_bias),
    )


def _latent_attention_tensors(shape: ModelShape) -> Table:
    """Return the tensors of latent attention (MLA).

    Queries are projected from latent features, or directly from hidden states. Keys and values are
    projected from latent features, except for the shared rotary key.
    """
    assert shape.kv_lora_rank is not None, "there are latent features"
    # As in DeepSeek-V2: a down-projection to latent features, a norm, and an up-projection.
    hidden, rank, latent = shape.hidden, shape.q_lora_rank, shape.kv_lora_rank
    width_per_head = shape.qk_nope_head_dim + shape.v_head_dim
    down = (
        ()
        if rank is None
        else (
            *_linear_tensors("attention.query_down", rank, hidden, has_bias=False),
            *_norm_tensors(shape, "attention.query_norm", rank),
        )
    )
    return (
        *down,
        *_linear_tensors("attention.query_up", shape.query_width, rank or hidden, has_bias=False),
        *_linear_tensors(
            "attention.kv_down", latent + shape.qk_rope_head_dim, hidden, has_bias=False
        ),
        *_norm_tensors(shape, "attention.kv_norm", latent),
        *_linear_tensors("attention.kv_up", shape.heads * width_per_head, latent, has_bias=False),
        *_linear_tensors("attention.output", hidden, shape.value_width, has_bias=False),
    )


def _feed_forward_tensors(shape: ModelShape, name: str, width: int) -> Table:
    """Return the tensors of a feed-forward module."""
    has_bias = shape.bias is Bias.ALL
    return (
        *(
            row
            for part in _inner_projections(shape)
            for row in _linear_tensors(f"{name}.{part}", width, shape.hidden, has_bias=has_bias)
        ),
        *_linear_tensors(f"{name}.down", shape.hidden, width, has_bias=has_bias),
    )


def _inner_projections(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of the projections from hidden states to the inner features."""
    return ("gate", "up") if shape.activation.is_gated else ("up",)


def _moe_tensors(shape: ModelShape) -> Table:
    """Return the tensors of a layer with experts: router, stacked experts, and shared experts.

    Each projection of all experts is one tensor. Shared experts are one feed-forward module.
    """
    assert shape.experts is not None, "the layer has some"
    experts, width, hidden = shape.experts, shape.width_of_expert, shape.hidden
    shared = shape.shared_experts * width
    return (
        ("mlp.router.weight", (experts, hidden)),
        *(
            (f"mlp.{EXPERTS}.{part}.weight", (experts, width, hidden))
            for part in _inner_projections(shape)
        ),
        (f"mlp.{EXPERTS}.down.weight", (experts, hidden, width)),
        *(_feed_forward_tensors(shape, "mlp.shared", shared) if shared else ()),
    )


def is_of_experts(name: str) -> bool:
    """Return True if a tensor belongs to experts that a router chooses from."""
    return EXPERTS in name.split(".")


def is_of_adapter(name: str) -> bool:
    """Return True if a tensor belongs to a LoRA adapter."""
    return name.split(".")[-2] in ADAPTER if "." in name else False


def _with_adapters(table: Table, rank: int) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of a block, each linear module followed by its adapter."""
    owners = [name.rpartition(".")[0] for name, _ in table]
    widths: dict[str, Shape] = {}
    for at, (name, dims) in enumerate(table):
        yield name, dims
        owner = owners[at]
        if name.endswith(".weight") and len(dims) == _MATRIX:
            widths[owner] = dims
        if owner in widths and owner not in owners[at + 1 :]:
            outputs, inputs = widths[owner]
            yield from (
                (f"{owner}.lora_A.weight", (rank, inputs)),
                (f"{owner}.lora_B.weight", (outputs, rank)),
            )


def count_weights(facts: ModelFacts) -> int:
    """Return the number of parameters before quantization."""
    if not facts.quantized_numel:
        return facts.numel
    return sum(tensor.num_quantized or tensor.numel for tensor in facts.tensors)


def quantize_facts(facts: ModelFacts, kind: Quantization) -> ModelFacts:
    """Return the facts of a built-in model whose linear layers have quantized weights."""

    def quantize_tensor(tensor: TensorFacts) -> TensorFacts:
        is_linear = tensor.name.startswith("blocks.") and len(tensor.shape) == _MATRIX
        if not (is_linear and tensor.is_frozen):
            return tensor
        rows, columns = tensor.shape
        stored = (rows, kind.row_bytes(columns))
        return tensor._replace(shape=stored, num_quantized=tensor.numel)

    units = [
        replace(unit, tensors=tuple(map(quantize_tensor, unit.tensors))) for unit in facts.units
    ]
    tables = [
        (f"{tensor.name.removesuffix('weight')}pairs", _BYTE_VALUES)
        for unit in units
        for tensor in unit.tensors
        if tensor.num_quantized and kind is Quantization.NF4
    ]
    return replace(facts, units=tuple(units), buffers=(*facts.buffers, *tables))


def elements_met(shape: ModelShape, name: str, numel: int) -> int:
    """Return the number of a tensor's elements that one token uses.

    Args:
        shape: The model.
        name: The name of the tensor.
        numel: The number of its elements.

    Returns:
        For a tensor of experts, the elements of the experts that a token is routed to; else all.
    """
    if shape.experts is None or not is_of_experts(name):
        return numel
    # All experts of a layer are stacked in one tensor.
    return numel // shape.experts * shape.experts_per_token


def _norm_tensors(shape: ModelShape, name: str, features: int) -> Table:
    """Return the tensors of a norm."""
    return tuple((f"{name}.{tensor}", (features,)) for tensor in shape.norm.tensor_names)


def _linear_tensors(name: str, outputs: int, inputs: int, *, has_bias: bool) -> Table:
    """Return the tensors of a linear module."""
    bias: Table = ((f"{name}.bias", (outputs,)),) if has_bias else ()
    return ((f"{name}.weight", (outputs, inputs)), *bias)


def _root_tensors(shape: ModelShape, sequence: int) -> tuple[Table, Table]:
    """Return the tensors before the blocks and after them."""
    hidden, rows = shape.hidden, shape.vocab_rows
    front: Table = (("embed.weight", (rows, hidden)),)
    if shape.positions is Positions.LEARNED:
        front = (*front, ("positions.weight", (sequence, hidden)))
    # A tied head has no tensor: `named_parameters` yields a shared tensor once, by its first name.
    head = () if shape.tied else _linear_tensors("head", rows, hidden, has_bias=shape.head_bias)
    return front, (*_norm_tensors(shape, "norm", hidden), *head)


OF_VOCABULARY = ("embed.weight", "head.weight", "head.bias")  # with `vocab_rows` rows each
OF_TOKENS = "_TK"  # suffix of tables with a row for each token
BIAS, COUNTS = (
    "bias_E",
    "load_E",
)  # a router's buffers: the bias and the number of choices per expert


def tables_of(shape: ModelShape, sequence: int) -> dict[str, tuple[int, int]]:
    """Return the tables of reals that a model has as buffers: rotations, and the mask of a window.

    Args:
        shape: The model.
        sequence: The number of tokens of a sample.

    Returns:
        The rows and columns of each table by name, in the model's order.
    """
    pairs = shape.rotary_dim // 2
    names = ["cos_TK", "sin_TK"] if pairs else []
    if shape.window_rope_base is not None:
        names += [f"{LOCAL}{name}" for name in names]
    tables = dict.fromkeys(names, (sequence, pairs))
    # flex_attention computes its mask from indices. The other implementations read one from a
    # buffer.
    takes_mask = shape.attention is not Attention.FLEX
    if takes_mask and shape.window is not None and shape.window < sequence:
        tables[f"{LOCAL}TT"] = (sequence, sequence)
    return tables


def _buffer_sizes(shape: ModelShape, sequence: int) -> tuple[tuple[str, int], ...]:
    """Return the name and the bytes of each buffer."""
    tables = tables_of(shape, sequence).items()
    buffers = [(name, rows * columns * _FP32) for name, (rows, columns) in tables]
    if shape.experts is not None and shape.bias_update_rate is not None:
        for layer in filter(shape.has_experts, range(shape.layers)):
            router = f"blocks.{layer}.mlp.router"
            buffers.append((f"{router}.{BIAS}", shape.experts * _FP32))
            buffers.append((f"{router}.{COUNTS}", shape.experts * _INT64))
    return tuple(buffers)


def _gradient_order(shape: ModelShape, blocks: Mapping[str, Table]) -> tuple[str, ...]:
    """Return the parameters in the order in which a backward pass completes their gradients.

    It is the reverse order of use. A tied embedding is complete only at its first use.
    """
    front, behind = (tuple(name for name, _ in table) for table in _root_tensors(shape, 0))
    within = (
        f"{block_name}.{name}"
        for block_name, block in reversed([*blocks.items()])
        for name in _completion_order(tuple(name for name, _ in block))
    )
    return (*_completion_order(behind), *within, *reversed(front))


def _completion_order(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the tensors of modules in the order in which their gradients are complete.

    Modules come in reverse. A linear's bias is before its weight, whose gradient passes another
    autograd node, a transpose. A norm's gradients are complete together, in the order of its
    arguments.
    """
    of_module: dict[str, list[str]] = {}
    for name in names:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    for module, parameters in reversed(of_module.items()):
        yield from parameters if module.endswith("norm") else reversed(parameters)


def roles_of(
    shape: ModelShape, *, has_whole_experts: bool = False, shares_kv_heads: bool = False
) -> Roles:
    """Return the roles of a built-in model's modules, in the order of a forward pass.

    Norms of heads apply to a rank's heads; all other norms are between sub-blocks.

    Args:
        shape: The model.
        has_whole_experts: Each rank has some full experts, and a shard of the features of shared
            ones.
        shares_kv_heads: Several ranks share a key-value head.
    """
    is_learned = shape.positions is Positions.LEARNED
    blocks = (
        *((f"blocks.*.{name}", Role.NORM) for name in _norm_names(shape, "attention")),
        ("blocks.*.attention", Role.LATENT_INPUT if shape.is_latent else Role.WHOLE_INPUT),
        *(
            (f"blocks.*.attention.{name}", role)
            for name, role in _attention_roles(shape, shares_kv_heads)
        ),
        ("blocks.*.attention.output", Role.ROW),
        *((f"blocks.*.{name}", Role.NORM) for name in _norm_names(shape, "mlp")),
        *_feed_forward_roles(shape, has_whole_experts),
    )
    positions = (("positions", Role.POSITIONS),) if is_learned else ()
    head = () if shape.tied else (("head", Role.HEAD),)
    return (("embed", Role.VOCABULARY), *positions, *blocks, ("norm", Role.LAST_NORM), *head)


def _attention_roles(shape: ModelShape, shares_kv_heads: bool) -> Iterator[tuple[str, Role]]:
    """Yield the roles of the projections to queries, keys and values.

    Latent features are replicated: they serve all heads, so each rank's heads contribute a part of
    their gradient.
    """
    if shape.is_latent:
        down = ["query_down", "query_norm"] if shape.q_lora_rank else []
        yield from ((name, Role.LATENT) for name in (*down, "kv_down", "kv_norm"))
        yield from ((name, Role.INNER_COLUMN) for name in ("query_up", "kv_up"))
        return
    yield "query", Role.COLUMN
    kv_role = Role.GROUP_COLUMN if shares_kv_heads else Role.COLUMN
    yield from ((name, kv_role) for name in ("key", "value"))
    yield from ((name, Role.SHARED) for name in ("query_norm", "key_norm") if shape.qk_norm)


def _feed_forward_roles(shape: ModelShape, has_whole_experts: bool) -> Iterator[tuple[str, Role]]:
    """Yield the roles of feed-forward layers, without experts and with them.

    If experts are sharded by features, each rank computes a part of a sum, for shared experts too;
    the parts are summed once. If ranks have full experts, only the output of shared experts is a
    sum.
    """
    inner = ("gate", "up") if shape.activation.is_gated else ("up",)
    for place in _layer_numbers(shape, with_experts=False):
        yield from _column_row_pair(f"blocks.{place}.mlp", inner)
    for place in _layer_numbers(shape, with_experts=True):
        expert_role = Role.WHOLE_EXPERTS if has_whole_experts else Role.EXPERTS
        yield f"blocks.{place}.mlp", expert_role
        yield f"blocks.{place}.mlp.router", Role.SHARED
        if has_whole_experts:
            if shape.shared_experts:
                yield from _column_row_pair(f"blocks.{place}.mlp.shared", inner)
            continue
        for part in (EXPERTS, *(["shared"] if shape.shared_experts else [])):
            names = (f"blocks.{place}.mlp.{part}.{name}" for name in inner)
            yield from ((name, Role.INNER_COLUMN) for name in names)
            yield f"blocks.{place}.mlp.{part}.down", Role.INNER_ROW


def _column_row_pair(module: str, inner: Iterable[str]) -> Iterator[tuple[str, Role]]:
    """Yield the roles of a feed-forward module: column operators, then a row operator."""
    yield module, Role.WHOLE_INPUT
    yield from ((f"{module}.{name}", Role.COLUMN) for name in inner)
    yield f"{module}.down", Role.ROW


def _layer_numbers(shape: ModelShape, *, with_experts: bool) -> Iterable[object]:
    """Return the numbers of layers with or without experts, or * if all layers are equal."""
    if shape.experts is None or not shape.dense_layers:
        return "*" if with_experts is (shape.experts is not None) else ()
    dense = range(shape.dense_layers)
    return range(shape.dense_layers, shape.layers) if with_experts else dense


def _norm_names(shape: ModelShape, part: str) -> tuple[str, ...]:
    """Return the names of the norms before and after a sub-block."""
    has_own = part == "attention" or not shape.parallel
    return (*([f"{part}_norm"] * has_own), *([f"{part}_post_norm"] * shape.post_norm))
