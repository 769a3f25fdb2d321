"""Makes the tables of the built-in families cut over tp.

Like `traces.model_tables`, at prime shapes, on rank 0 of fake ranks with real tensors: `tp`, and
the rank's own heads, ffn, vocabulary and (where activations are cut) tokens are the symbols, beside
the whole vocabulary where it is no multiple of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ptrain.axes.tensor.run.apply import parallelize, whole_loss
from ptrain.facts.roles import roles_of
from ptrain.models.build import build
from ptrain.models.initialize import cast
from ptrain.models.trace import Recording, record
from ptrain.models.units import unit_modules
from ptrain.rooms.fake import fake_world
from ptrain.rooms.registry import Registry
from ptrain.spec.axis import Axis
from ptrain.spec.model import Family, ModelShape
from ptrain.steps.step import Parallelize
from ptrain.traces.model_tables import DTYPES, SMALLEST, BlockTableBuilder, Make, name

TP, BATCH, SEQUENCE, FFN, VOCAB, UNEVEN = 3, 13, 17, 19, 23, 67
HEADS = {
    Family.LLAMA: {"repeats": 7, "kv_heads": 5, "pairs": 11},
    Family.GPT: {"heads": 5, "head_dim": 7},
}
LAYERS = 2


@dataclass(frozen=True)
class CutKind:
    """How operators are cut: what a table depends on beside the model's own choices."""

    name: str
    is_sequence: bool = False
    is_saved_cut: bool = False
    is_naive: bool = False
    loss_parallel: bool = True

    def step(self, shape: ModelShape) -> Parallelize:
        return Parallelize(
            axis=Axis.TP,
            roles=roles_of(shape),
            is_sequence=self.is_sequence,
            is_saved_cut=self.is_saved_cut,
            is_naive=self.is_naive,
            loss_parallel=self.loss_parallel,
        )


KINDS = tuple(
    CutKind(name if loss else f"{name}-gathered", loss_parallel=loss, **flags)
    for name, flags in (
        ("whole", {}),
        ("cut", {"is_sequence": True}),
        ("saved", {"is_sequence": True, "is_saved_cut": True}),
        ("naive", {"is_naive": True}),
    )
    for loss in (True, False)
)


def shape_of(family: Family, kind: CutKind, *, tied: bool, special: bool) -> ModelShape:
    """Return a shape with a prime number of everything on a rank."""
    primes = HEADS[family]
    vocab = UNEVEN if kind.loss_parallel else TP * VOCAB
    if family is Family.LLAMA:
        kv_heads = TP * primes["kv_heads"]
        heads, head_dim = kv_heads * (primes["repeats"] if special else 1), 2 * primes["pairs"]
    else:
        heads = kv_heads = TP * primes["heads"]
        head_dim = primes["head_dim"]
    return ModelShape(
        family=family,
        layers=LAYERS,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        ffn=TP * FFN,
        vocab=vocab,
        tied=tied,
        dropout=0.1 if special and family is Family.GPT else 0.0,
    )


def symbols_of(family: Family, kind: CutKind) -> dict[str, int]:
    """Prime by symbol."""
    whole = {"vocab_all": UNEVEN} if kind.loss_parallel else {}
    common = {"batch": BATCH, "sequence": SEQUENCE, "ffn": FFN, "vocab": VOCAB}
    return {"tp": TP, **HEADS[family], **common, **whole}


def trace(
    step: Parallelize, mesh: DeviceMesh, shape: ModelShape, dtype: torch.dtype, batch: int
) -> Recording:
    """One micro-batch of this rank, when torch has learnt what each operator is cut to."""
    sequence = SEQUENCE * (mesh.size() if step.is_sequence else 1)
    model = build(shape, sequence=sequence)
    cast(model, dtype)
    parallelize(model, step, mesh, Registry())
    tokens = torch.zeros(batch, sequence + 1, dtype=torch.int64)

    def forward() -> torch.Tensor:
        return whole_loss(model(tokens[:, :-1]), tokens[:, 1:]) / (batch * sequence)

    with loss_parallel() if step.loss_parallel else nullcontext():
        record(model, unit_modules(model, SMALLEST), forward, tokens)
        return record(model, unit_modules(model, SMALLEST), forward, tokens)


def tables(mesh: DeviceMesh | None) -> Iterator[tuple[str, Make]]:
    """Yield the name of every variant of the models, and what makes the tables of every kind."""
    choices = itertools.product(Family, (False, True), (False, True), DTYPES, (BATCH, 1))
    for family, tied, special, precision, batch in choices:
        shape = shape_of(family, KINDS[0], tied=tied, special=special)
        make = partial(_of_every_kind, mesh, family, tied, special, precision, batch)
        yield name(shape, precision, batch), make


def _of_every_kind(
    mesh: DeviceMesh, family: Family, tied: bool, special: bool, precision: str, batch: int
) -> dict[str, object]:
    by_kind: dict[str, object] = {}
    for kind in KINDS:
        shape = shape_of(family, kind, tied=tied, special=special)
        tracer = partial(trace, kind.step(shape), mesh)
        symbols = symbols_of(family, kind)
        by_kind[kind.name] = BlockTableBuilder(shape, precision, batch, symbols, tracer).build()
    return by_kind


def fake_mesh() -> DeviceMesh:
    """Return the mesh of the fake ranks of tp, of which this process plays the first."""
    fake_world(0, TP)
    return init_device_mesh("cpu", (TP,), mesh_dim_names=(Axis.TP.value,))
