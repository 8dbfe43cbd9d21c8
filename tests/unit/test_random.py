"""The list of random operators is torch's own, and what concurrent calls draw is theirs alone."""

from __future__ import annotations

import threading

import torch

from moe_autograd._random import CallSeeds, operators_with_generator, own_streams, running


def test_every_random_operator_of_torch_is_caught() -> None:
    """A new version of torch that has another one fails here, instead of giving numbers in the order of arrival."""
    known = {name for name, _ in operators_with_generator()}
    found = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        name = qualified.removeprefix("aten::")
        if name == qualified or torch._C._dispatch_has_kernel_for_dispatch_key(
            qualified, "CompositeImplicitAutograd"
        ):
            continue
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if any(argument.name == "generator" for argument in operator._schema.arguments):
            found.add(name)
    assert known == found


def draw(seeds: CallSeeds, order: list[int]) -> dict[int, list[float]]:
    drawn: dict[int, list[float]] = {}

    def run(index: int) -> None:
        with own_streams(seeds):
            running.index = index
            drawn[index] = [*torch.rand(3).tolist(), *torch.dropout(torch.ones(8), 0.5, True).tolist()]

    for index in order:
        thread = threading.Thread(target=run, args=(index,))
        thread.start()
        thread.join()
    return drawn


def test_the_order_in_which_calls_draw_changes_nothing() -> None:
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        torch.manual_seed(5)
        results.append((draw(CallSeeds(), order), torch.rand(1).item()))
    assert results[0] == results[1]
    assert results[0][0][0] != results[0][0][1]


def test_a_generator_of_the_users_own_is_left_to_him() -> None:
    torch.manual_seed(5)
    with own_streams(CallSeeds()):
        running.index = 0
        own = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(own, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_after_the_calls_torch_has_its_own_generator_back() -> None:
    before = torch.random.default_generator
    with own_streams(CallSeeds()):
        assert torch.random.default_generator is not before
    assert torch.random.default_generator is before
