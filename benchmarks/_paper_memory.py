"""What the text claims of memory: Table 1, Definition 3, Theorem 1 and its examples."""

from __future__ import annotations

from _claims import (
    DP,
    HSDP,
    HSDP_FULL,
    KEEP,
    ODD,
    STAGES,
    ZERO2,
    ZERO3,
    Case,
    Claim,
    Form,
    Source,
    View,
    accumulating,
    one,
    seventy,
    with_overrides,
)

_LLAMA3_70B = Source("70b-dp", ("model.preset=llama3-70b",))
_LLAMA3_8B = Source("70b-dp", ("model.preset=llama3-8b",))
_ON_48 = ("model.preset=llama3-8b", "mesh.dp_shard=48", "batch.global=48", "cluster=null")


def _states(view: View) -> float:
    return view.found.states


def _per_parameter(view: View) -> float:
    return view.found.states / view.facts.numel


def _peak(view: View) -> float:
    return view.found.peak


def _reduction(before: View, after: View) -> float:
    return before.found.states / after.found.states


def _parameters(view: View) -> float:
    return view.found.parameters


def _gradients(view: View) -> float:
    return view.found.gradients


def _activations(view: View, _: View) -> float:
    return view.found.activations


def _count(view: View) -> float:
    """P, from the bytes that an unsharded run holds."""
    return view.found.parameters / view.spec.precision.effective.parameters.itemsize


def _embeddings(view: View) -> float:
    """The share of the parameters that stands outside the blocks."""
    outside = sum(unit.numel for unit in view.facts.units if not unit.name)
    return outside * view.spec.precision.effective.parameters.itemsize / view.found.parameters


def _gathered_at_the_peak(keeping: View, resharding: View) -> float:
    """Both peak where the logits live. There the first holds every unit whole, so what its peak
    has more is what the second does not hold."""
    return keeping.theta - (keeping.found.peak - resharding.found.peak)


def _gradients_at_the_peak(reducing: View, waiting: View) -> float:
    """The first holds its shard of the sum; the second besides what its peak has more."""
    return reducing.found.gradients + waiting.found.peak - reducing.found.peak


def _approximate_count(paper: list[View], _: list[View]) -> float:
    shape = paper[0].shape
    return 12 * shape.layers * shape.hidden**2


def _formula_unit(paper: list[View], _: list[View]) -> float:
    """12H² parameters in their bytes."""
    view = paper[0]
    return 12 * view.shape.hidden**2 * view.theta / view.facts.numel


def _sum_of_terms(paper: list[View], exact: list[View]) -> float:
    """(6) with the s_unit of (9), and the |A| that it takes as given."""
    found = paper[0].found
    return found.states + found.transient + exact[0].found.activations


def _shard_of_gradients(paper: list[View], _: list[View]) -> float:
    return paper[0].found.gradients


def _share_of_activations(_: list[View], exact: list[View]) -> float:
    return exact[1].found.activations / exact[0].spec.world_size


def _two_percent(_: list[View], __: list[View]) -> float:
    return 0.02


_OFFLOAD = seventy("zero-offload", "mesh.dp_shard=8", "precision.layout=zero16")
_OFFLOAD_AS_RUN = seventy("zero-offload-ds", "mesh.dp_shard=8", "precision.layout=zero16")
_MIXED = seventy("fsdp-mixed", "mesh.dp_shard=8")


def _beside_activations(view: View) -> float:
    """What the device holds at its peak besides saved activations."""
    return view.found.peak - view.found.activations


def _theorem_1(paper: list[View], _: list[View]) -> float:
    return paper[0].found.states + paper[0].found.transient


def _layout(name: str) -> Case:
    source = Source("70b-dp", (f"precision.layout={name}",))
    return one(f"layout {name}", source, _per_parameter, Form.PER_PARAMETER, DP)


def _peak_case(label: str, source: Source) -> Case:
    return Case(
        label=label,
        sources=(source,),
        figure=_peak,
        form=Form.BYTES,
        claimed=_sum_of_terms,
        loose=True,
    )


def _count_case(label: str, source: Source) -> Case:
    return Case(
        label=label,
        sources=(source,),
        figure=_count,
        form=Form.COUNT,
        claimed=_approximate_count,
    )


MEMORY = (
    Claim(
        title="A parameter costs 16 bytes",
        where="Table 1, Remark 1",
        printed="2 (parameters) + 2 (gradients) + 12 (master and Adam) = 16 bytes per parameter",
        cases=tuple(map(_layout, ("zero16", "fp32", "bf16", "fp16", "megatron18", "zero20"))),
        condition="in the layouts whose dtypes add up to it; fp32 does by coincidence (4 + 4 + 8)",
        why="The figure belongs to a choice of dtypes, which frameworks make differently: Megatron "
        "keeps fp32 gradients beside 16-bit parameters, other recipes keep both kinds, and "
        "pure bf16 has no master. Optimizers also keep a step counter of 4 bytes per tensor.",
    ),
    Claim(
        title="Model states of the four stages",
        where="Theorem 1 (7)–(9), Example 3; stages 1 and 2 by the formulas of the notes",
        printed="70B on 8 devices: 1120, 385, 262.5 and 140 GB per device",
        cases=tuple(one(label, source, _states, Form.BYTES) for label, source in STAGES.items()),
        why="All dimensions of these models divide by the ranks, and s_unit is not at rest.",
    ),
    Claim(
        title="Stage 3 saves 8× over stage 2",
        where="§1",
        printed="stages 2 and 3 differ in one placement, and from it 1120 GB become 140 GB, 8×",
        cases=(
            Case(
                label="ZeRO-2 → ZeRO-3",
                sources=(ZERO2, ZERO3),
                figure=_reduction,
                form=Form.TIMES,
                claimed_by=(DP, ZERO3),
            ),
            Case(label="DP → ZeRO-3", sources=(DP, ZERO3), figure=_reduction, form=Form.TIMES),
        ),
        why="The two figures are those of plain data parallelism and stage 3, between which 8× is "
        "right (the second row). Stage 2 has most of that saving already, because 14 of the 16 "
        "bytes are optimizer state and gradients.",
    ),
    Claim(
        title="The count of parameters",
        where="§2.1",
        printed="P ≈ 12LH²",
        cases=(
            _count_case("the text's 70B, as a Llama shape", DP),
            _count_case("Llama 3 70B", _LLAMA3_70B),
            _count_case("Llama 3 8B", _LLAMA3_8B),
        ),
        why="Grouped queries shrink attention below 4H², a gated feed-forward layer has three "
        "matrices instead of two, and embeddings are left out. Count the tensors.",
    ),
    Claim(
        title="Embeddings are a small share",
        where="§2.1, footnote 1",
        printed="1–2 % of a 70B model with a typical vocabulary",
        cases=tuple(
            Case(
                label=label,
                sources=(source,),
                figure=_embeddings,
                form=Form.SHARE,
                claimed=_two_percent,
                at_most=True,
            )
            for label, source in (("Llama 3 70B", _LLAMA3_70B), ("Llama 3 8B", _LLAMA3_8B))
        ),
        why="Vocabularies have grown to 128 256 tokens, and the head is a second matrix of that "
        "size. A smaller model has the same vocabulary and therefore a larger share.",
    ),
    Claim(
        title="What a gathered unit takes",
        where="Definition 3, Theorem 1 (9)",
        printed="s_unit is one layer, 12H² parameters",
        cases=tuple(
            Case(
                label=label,
                sources=(with_overrides(KEEP, *preset), with_overrides(ZERO3, *preset)),
                figure=_gathered_at_the_peak,
                form=Form.BYTES,
                claimed=_formula_unit,
            )
            for label, preset in (
                ("70B", ()),
                ("Llama 3 8B, 512 tokens", ("model.preset=llama3-8b", "batch.sequence=512")),
            )
        ),
        why="The root unit (embeddings and head) is gathered like a layer and is larger than one. "
        "At the peak it lives together with the layers that are on their way in or out.",
    ),
    Claim(
        title="The sum of the four terms is the device's memory",
        where="Theorem 1 (6)",
        printed="M = μ(Θ) + μ(Ω) + μ(G) + μ(A) is the memory per device",
        cases=(
            _peak_case("DP", DP),
            _peak_case("ZeRO-3", ZERO3),
            _peak_case(
                "ZeRO-3, Llama 3 8B, 8192 tokens",
                with_overrides(ZERO3, "model.preset=llama3-8b", "batch.sequence=8192"),
            ),
        ),
        why="The states do not peak at the same moment: when activations and the logits' gradient "
        "are largest there are few or no gradients yet, and the logits themselves, the reduction "
        "buffers and the gathered root have no term. The two errors partly cancel.",
        condition="where states that are always there are nearly all of it, as in DP",
    ),
    Claim(
        title="A shard is s/N",
        where="Definition 1 (2), Theorem 1 (8)",
        printed="μ(S, s) = s/N",
        cases=(
            one("ZeRO-3, every dimension divides by N", ZERO3, _parameters, Form.BYTES),
            one(
                "ZeRO-3, Llama 3 8B on 48 ranks",
                Source("70b-zero3", _ON_48, ODD),
                _parameters,
                Form.BYTES,
            ),
        ),
        condition="where the first dimension of every tensor divides by N",
        why="fully_shard cuts each tensor by rows, ceil(d0/N) on every rank, and pads what is "
        "missing. Three-headed shapes or 48 ranks pay for it in every tensor.",
    ),
    Claim(
        title="16P/N for FSDP on N devices",
        where="Table 2, Theorem 1 with Definition 5",
        printed="ZeRO-3/FSDP takes 16P/N on N devices",
        cases=(
            one("one axis of 8", ZERO3, _states, Form.BYTES),
            one("HSDP, 2 × 4", HSDP, _states, Form.BYTES, ZERO3),
            one("HSDP, 2 × 4, optimizer over all 8", HSDP_FULL, _states, Form.BYTES, ZERO3),
        ),
        condition="when all three states are sharded along one axis and N is its degree, which "
        "need not be the number of devices",
        why="HSDP replicates between its groups, the optimizer included, so N is the size of a "
        "group; the optimizer alone may be cut over all devices. Composed by Definition 5 the "
        "theorem says so too; the table's row does not.",
    ),
    Claim(
        title="Accumulation changes nothing else",
        where="§9",
        printed="accumulation is a straightforward extension; G stays S, |G|/N per device",
        cases=(
            Case(
                label="ZeRO-3, 4 micro-batches, reduced once",
                sources=(
                    accumulating("zero3"),
                    accumulating("zero3", "sync.gradients=last"),
                ),
                figure=_gradients_at_the_peak,
                form=Form.BYTES,
                claimed=_shard_of_gradients,
            ),
        ),
        why="Without a reduction after each micro-batch (no_sync) every rank keeps the whole "
        "unreduced gradient until the last: the switch turns G from S into R.",
    ),
    Claim(
        title="Activations are spread over the devices",
        where="Example 3",
        printed="μ(R, |A|/N): each device has |A|/N, where Theorem 1 has |A|",
        cases=(
            Case(
                label="DP, against one device with the whole batch",
                sources=(
                    DP,
                    Source(
                        "70b-dp",
                        ("mesh.dp_replicate=1", "batch.micro=8", "cluster=null"),
                        ("batch.micro=4",),
                        ranks=1,
                        samples=4,
                    ),
                ),
                figure=_activations,
                form=Form.BYTES,
                claimed=_share_of_activations,
            ),
        ),
        why="|A| is then what one device would save for the global batch: a data axis splits "
        "samples, and saved tensors grow with the samples.",
    ),
    Claim(
        title="ZeRO-Offload's states",
        where="Table 2, Theorem 1 (8), (11)",
        printed="(O, O, S, R): Θ and Ω take nothing of the device, gradients |G|/N",
        cases=(
            one("at rest, as the row has it", _OFFLOAD, _states, Form.BYTES),
            Case(
                label="at the peak, besides activations",
                sources=(_OFFLOAD,),
                figure=_beside_activations,
                form=Form.BYTES,
                claimed=_theorem_1,
                loose=True,
            ),
            one(
                "at rest, as the ZeRO-Offload paper runs it (R, O, O, R)",
                _OFFLOAD_AS_RUN,
                _states,
                Form.BYTES,
                _OFFLOAD,
            ),
        ),
        condition="between steps, for the row as printed",
        why="An offloaded parameter comes to the device for use, whole: the root and the layers in "
        "flight take their s_unit, which (11) has not, while most gradients are not there yet when "
        "the device holds most. The system of that name keeps 16-bit "
        "parameters on the device and puts gradients on the host: (R, O, O, R).",
    ),
    Claim(
        title="Mixed-precision FSDP is ZeRO-3",
        where="Table 2, Remark 1",
        printed="ZeRO-3/FSDP takes 2 + 2 + 12 bytes per parameter, over N",
        cases=(
            one("parameters", _MIXED, _parameters, Form.BYTES, ZERO3),
            one("gradients", _MIXED, _gradients, Form.BYTES, ZERO3),
            one("all three", _MIXED, _states, Form.BYTES, ZERO3),
        ),
        why="fully_shard keeps fp32 shards, which are the masters, and makes 16-bit parameters of "
        "them unit by unit: Θ is M, not S*. Gradients are kept in fp32. Only the sum is right, "
        "since 0 + 4 + 12 happens to be 2 + 2 + 12.",
    ),
)
