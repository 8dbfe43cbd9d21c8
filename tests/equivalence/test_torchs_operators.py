"""What torch itself is tested with, all operators and modules of its databases, is the same through the map."""

from __future__ import annotations

import pytest

from tests.support.subprocesses import assert_prints

NUM_SHARDS = 2


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_values_and_two_orders_of_gradients_of_every_operator(shard: int, dtype: str) -> None:
    program = f"""
        import torch
        from tests.support.torchs_databases import compare, operators

        compare(operators(torch.{dtype}, slice({shard}, None, {NUM_SHARDS})), at_least=160)
    """
    assert_prints(program, "")


@pytest.mark.parametrize("training", [True, False])
def test_values_and_two_orders_of_gradients_of_every_module(training: bool) -> None:
    program = f"""
        from tests.support.torchs_databases import compare, modules

        compare(modules(training={training}), at_least=100)
    """
    assert_prints(program, "")
