"""The parameters of a gpt in closed form. P = 12LH² counts its matrices and nothing else;
`remainder` names what it leaves out."""

from __future__ import annotations

from ptrain.spec.model import Family, ModelShape


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
    """Return the elements of a gpt's block other than its 12H² of matrices (s_unit = 12H²·e)."""
    assert shape.tabulated is Family.GPT and shape.ffn == 4 * shape.hidden
    return {
        "biases": 9 * shape.hidden,  # 4H in attention, 4H up, H down
        "norms": 4 * shape.hidden,  # two of them, weight and bias
    }
