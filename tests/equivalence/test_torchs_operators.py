"""What torch itself is tested with, all operators and modules of its databases, is the same through the map."""

from __future__ import annotations

from tests.support.subprocesses import assert_prints

# To import the databases takes as long as to compare half of them, so there is one process for each.


def test_values_and_two_orders_of_gradients_of_every_operator() -> None:
    program = """
        import torch
        from tests.support.torchs_databases import compare, operators

        for dtype in (torch.float64, torch.complex128):
            compare(operators(dtype), at_least=320)
    """
    assert_prints(program, "")


def test_values_and_two_orders_of_gradients_of_every_module() -> None:
    program = """
        from tests.support.torchs_databases import compare, modules

        compare(modules(training=True), at_least=100)
        compare(modules(training=False), at_least=14)
    """
    assert_prints(program, "")
