"""The attributes that are compared to prove that two blocks are identical."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

import pytest
from torch import nn

from ptrain.simulation.equal_blocks import (
    NotComparableError,
    common_leaves,
    differ_in_layers_alone,
    structure_of,
)


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.index = index
        self.settings = {"eps": 1e-5, "kinds": ["full"]}


class Config:
    def __init__(self) -> None:
        self.width = 3


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.num_layers = layers
        self.kinds = ["full"] * layers
        self.blocks = nn.ModuleList(Block(index) for index in range(layers))


def names(layers: int) -> list[str]:
    return [f"blocks.{index}" for index in range(layers)]


def is_alike(stack: Stack) -> bool:
    _, blocks = structure_of(stack, names(len(stack.blocks)))
    return common_leaves(blocks) is not None


def test_blocks_that_differ_only_in_their_index_are_identical() -> None:
    assert is_alike(Stack(4))


def test_a_block_with_another_attribute_shape_or_hook_is_another() -> None:
    changes = (
        lambda block: block.settings.update(eps=1e-6),
        lambda block: block.settings["kinds"].append("sliding"),
        lambda block: setattr(block, "index", 7),
        lambda block: setattr(block, "flag", True),
        lambda block: setattr(block, "linear", nn.Linear(2, 4)),
        lambda block: block.linear.weight.requires_grad_(False),
        lambda block: block.register_forward_hook(lambda *_: None),
        lambda block: block.eval(),
    )
    for change in changes:
        stack = Stack(4)
        change(stack.blocks[2])
        assert not is_alike(stack)


def test_blocks_that_share_a_module_or_refer_to_one_another_differ() -> None:
    shares, refers = Stack(4), Stack(4)
    for block in shares.blocks:
        block.linear = shares.blocks[0].linear
    for block in refers.blocks:
        block.__dict__["first"] = refers.blocks[0]
    assert not is_alike(shares)
    assert not is_alike(refers)


def test_references_to_the_enclosing_module_are_equal() -> None:
    stack = Stack(4)
    stack.config = Config()
    for block in stack.blocks:
        block.config = stack.config
    assert is_alike(stack)


class Slotted:
    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = 1


class Hiding(Slotted):
    """Has a dictionary too, which does not say all."""


class Counting(random.Random):
    """Keeps its state where C does."""


@pytest.mark.parametrize("make", [threading.Lock, Slotted, Hiding, Counting])
def test_an_attribute_without_a_value_is_no_proof(make: Callable[[], object]) -> None:
    stack = Stack(4)
    stack.hidden = make()
    with pytest.raises(NotComparableError):
        structure_of(stack, names(4))


def test_a_partial_function_is_compared_by_its_arguments() -> None:
    stack = Stack(4)
    for index, block in enumerate(stack.blocks):
        block.scale = partial(round, ndigits=2 if index < 3 else 4)
    assert not is_alike(stack)
    stack.blocks[3].scale = partial(round, ndigits=2)
    assert is_alike(stack)


def test_around_the_blocks_only_their_number_may_differ() -> None:
    def differ_by_layers(stack: Stack, other: Stack) -> bool:
        layers = len(stack.blocks), len(other.blocks)
        (around, _), (elsewhere, _) = (
            structure_of(model, names(len(model.blocks))) for model in (stack, other)
        )
        return differ_in_layers_alone(around, elsewhere, layers)

    long, short = Stack(5), Stack(3)
    assert differ_by_layers(long, short)
    long.kinds[3] = "sliding"
    assert not differ_by_layers(long, short)
    long.kinds[3], long.extra = "full", 4
    assert not differ_by_layers(long, short)
    short.extra = 4
    assert differ_by_layers(long, short)
    short.first = short.blocks[0]
    assert not differ_by_layers(long, short)
