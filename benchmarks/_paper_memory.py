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
    Form,
    Source,
    View,
    accumulating,
    claim,
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
    claim(
        "A parameter costs 16 bytes",
        cases=tuple(map(_layout, ("zero16", "fp32", "bf16", "fp16", "megatron18", "zero20"))),
    ),
    claim(
        "Model states of the four stages",
        cases=tuple(one(label, source, _states, Form.BYTES) for label, source in STAGES.items()),
    ),
    claim(
        "Stage 3 saves 8× over stage 2",
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
    ),
    claim(
        "The count of parameters",
        cases=(
            _count_case("the text's 70B, as a Llama shape", DP),
            _count_case("Llama 3 70B", _LLAMA3_70B),
            _count_case("Llama 3 8B", _LLAMA3_8B),
        ),
    ),
    claim(
        "Embeddings are a small share",
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
    ),
    claim(
        "What a gathered unit takes",
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
    ),
    claim(
        "The sum of the four terms is the device's memory",
        cases=(
            _peak_case("DP", DP),
            _peak_case("ZeRO-3", ZERO3),
            _peak_case(
                "ZeRO-3, Llama 3 8B, 8192 tokens",
                with_overrides(ZERO3, "model.preset=llama3-8b", "batch.sequence=8192"),
            ),
        ),
    ),
    claim(
        "A shard is s/N",
        cases=(
            one("ZeRO-3, every dimension divides by N", ZERO3, _parameters, Form.BYTES),
            one(
                "ZeRO-3, Llama 3 8B on 48 ranks",
                Source("70b-zero3", _ON_48, ODD),
                _parameters,
                Form.BYTES,
            ),
        ),
    ),
    claim(
        "16P/N for FSDP on N devices",
        cases=(
            one("one axis of 8", ZERO3, _states, Form.BYTES),
            one("HSDP, 2 × 4", HSDP, _states, Form.BYTES, ZERO3),
            one("HSDP, 2 × 4, optimizer over all 8", HSDP_FULL, _states, Form.BYTES, ZERO3),
        ),
    ),
    claim(
        "Accumulation changes nothing else",
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
    ),
    claim(
        "Activations are spread over the devices",
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
    ),
    claim(
        "ZeRO-Offload's states",
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
    ),
    claim(
        "Mixed-precision FSDP is ZeRO-3",
        cases=(
            one("parameters", _MIXED, _parameters, Form.BYTES, ZERO3),
            one("gradients", _MIXED, _gradients, Form.BYTES, ZERO3),
            one("all three", _MIXED, _states, Form.BYTES, ZERO3),
        ),
    ),
)
