"""The list of random operators is torch's own, and what concurrent calls draw is theirs alone."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from moe_autograd._random import (
    CallSeeds,
    GivenSeeds,
    operators,
    own_streams,
    running,
    seeds,
    seeds_elsewhere,
    stand_ins,
)
from tests.support.subprocesses import assert_prints


def test_every_random_operator_of_torch_is_caught() -> None:
    """A new version of torch that has another one fails here, instead of giving numbers in the order of arrival."""
    known = {name for name, _ in operators.operators_with_generator()}
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


def draw(call_seeds: CallSeeds, order: list[int]) -> dict[int, list[float]]:
    drawn: dict[int, list[float]] = {}

    def run(index: int) -> None:
        with own_streams(call_seeds):
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


def test_a_call_that_puts_its_own_state_back_draws_as_if_it_had_not_set_another() -> None:
    drawn = []
    for sets_another in (False, True):
        torch.manual_seed(5)
        with own_streams(CallSeeds()):
            running.index = 0
            if sets_another:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1)
                    torch.rand(1)
            own = torch.rand(2)
        drawn.append([*own.tolist(), *torch.rand(2).tolist()])
    assert drawn[0] == drawn[1]


def test_to_end_once_more_does_nothing() -> None:
    outer, inner = CallSeeds(), own_streams(CallSeeds())
    with own_streams(outer):
        with inner:
            assert running.seeds is not outer
        inner.__exit__(None, None, None)
        assert running.seeds is outer


def test_what_has_no_numbers_draws_none() -> None:
    torch.manual_seed(5)
    with own_streams(CallSeeds()):
        assert torch.rand(3, device="meta").shape == (3,)
        assert torch.nn.functional.dropout(torch.ones(3, device="meta")).device.type == "meta"
        assert torch.native_dropout(torch.empty(0), 0.5, True)[0].shape == (0,)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


# ---- generators of devices; the device is a fake, its generators are real


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module such as `torch.cuda`, whose one device computes on the CPU."""
    module = SimpleNamespace(default_generators=(torch.Generator().manual_seed(1),))
    monkeypatch.setattr(stand_ins, "_accelerator_in_use", lambda: ("cuda", module))
    monkeypatch.setattr(seeds, "_new_generator", lambda device: torch.Generator())
    return module


def test_the_state_of_a_device_is_that_of_the_call_which_asks(device: SimpleNamespace) -> None:
    own = device.default_generators
    before = own[0].get_state()
    states: list[torch.Tensor] = []
    with own_streams(CallSeeds()):
        for running.index in range(2):
            states.append(device.default_generators[0].get_state())
            assert device.default_generators[0].initial_seed() != own[0].initial_seed()
    assert not torch.equal(states[0], states[1])
    assert device.default_generators is own
    assert torch.equal(own[0].get_state(), before)


def test_a_call_that_sets_a_devices_state_sees_its_numbers_again_and_nobody_else_does(
    device: SimpleNamespace,
) -> None:
    own, place = CallSeeds(), torch.device("cuda", 0)

    def draw() -> list[float]:
        return torch.rand(4, generator=own.draw(running.index, place)).tolist()

    with own_streams(own):
        running.index = 0
        state = device.default_generators[0].get_state()
        first, second = draw(), draw()
        device.default_generators[0].set_state(state)
        assert draw() == first
        running.index = 1
        assert draw() not in (first, second)
        device.default_generators[0].manual_seed(3)
        assert draw() == torch.rand(4, generator=torch.Generator().manual_seed(3)).tolist()
    assert device.default_generators[0].initial_seed() == 1


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `cuda` and `cuda:1` would be two streams of the same numbers."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert operators._device_of((), {"device": "cuda"}) == torch.device("cuda", 1)
    assert operators._device_of((), {"device": "cuda:0"}) == torch.device("cuda", 0)
    assert operators._device_of((), {}) == torch.device("cpu")


def test_maps_of_two_threads_that_meet_draw_different_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second draws when the first is about to."""
    first, second = CallSeeds(), CallSeeds()
    mix, met = seeds._mix, []

    def meet(base: int, index: int) -> int:
        if not met:
            met.append(base)
            met.append(second.draw(0, seeds.CPU).initial_seed())
        return mix(base, index)

    monkeypatch.setattr(seeds, "_mix", meet)
    assert first.draw(0, seeds.CPU).initial_seed() != met[1]


def test_calls_apart_do_not_draw_what_those_drew_that_come_back_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = CallSeeds().apart(), CallSeeds()
    drawn = first.draw(0, seeds.CPU).initial_seed()
    mix = seeds._mix

    def come_back(base: int, index: int) -> int:
        monkeypatch.setattr(seeds, "_mix", mix)
        first.come_back()
        return mix(base, index)

    monkeypatch.setattr(seeds, "_mix", come_back)
    assert second.apart().draw(0, seeds.CPU).initial_seed() != drawn


def test_no_call_elsewhere_that_may_draw_has_the_seed_of_one_that_draws_nothing() -> None:
    with own_streams(GivenSeeds(0)):
        running.index, running.places = 0, [0, 1]
        with seeds_elsewhere([True, False]) as (given, _):
            assert given == [1, 0]


def test_a_call_that_asks_for_seeds_elsewhere_again_has_others() -> None:
    with own_streams(CallSeeds()):
        running.index, running.places = 0, [0]
        with seeds_elsewhere([True]) as (first, _), seeds_elsewhere([True]) as (second, _):
            assert first != second


def test_while_calls_within_a_call_may_draw_elsewhere_nobody_draws_what_follows_from_it() -> None:
    outer, others = CallSeeds(), CallSeeds()
    with own_streams(outer):
        running.index = 0
        with seeds_elsewhere([True]):
            drawn = others.draw(0, seeds.CPU).initial_seed()
        assert drawn != outer.seed_of(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_runs_calls_has_torchs_own_generator() -> None:
    before, runs, is_over = torch.random.default_generator, threading.Event(), threading.Event()

    def run() -> None:
        with own_streams(CallSeeds()):
            runs.set()
            is_over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    runs.wait()
    child = os.fork()
    if not child:
        os._exit(3 if torch.random.default_generator is before else 4)
    is_over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


COLLECTED_WHERE_A_CALL_FIRST_DRAWS = """
import gc, torch
from moe_autograd import parallel_apply

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        {finalizer}

def call(x):
    gc.collect()
    Garbage()  # which the next call collects, if this one does not
    gc.set_threshold(num_allocations)
    noise = torch.rand(3)
    gc.set_threshold(0)
    return x + noise

gc.freeze()
for num_allocations in range(1, 40):
    parallel_apply([call] * 2, [(torch.zeros(3, requires_grad=True),)] * 2)
gc.collect()
print("ended")
"""
FORKS_THE_GENERATOR = """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            torch.rand(1)
"""
MAKES_A_MAP = """
        parallel_apply([torch.rand] * 2, [(1,)] * 2)
"""


@pytest.mark.parametrize(
    "finalizer", [FORKS_THE_GENERATOR, MAKES_A_MAP], ids=["forks the generator", "makes a map"]
)
def test_a_finalizer_draws_wherever_it_is_collected(finalizer: str) -> None:
    """It waited for the lock that its thread held, or for calls that did: a call's first draw moves the stream on."""
    assert_prints(COLLECTED_WHERE_A_CALL_FIRST_DRAWS.format(finalizer=finalizer.strip()), "ended", limit_s=60)


def test_a_finalizer_makes_a_map_that_draws_as_the_interpreter_exits() -> None:
    """Torch took the second kernels away before that, and the key was still switched on."""
    assert_prints(
        """
        import torch
        from moe_autograd import parallel_apply

        def drop_out():
            return parallel_apply(modules, inputs)

        class Garbage:
            def __init__(self):
                self.itself = self

            def __del__(self):
                print(len(drop_out()), flush=True)

        # made before: some that are made as late have torch itself abort
        modules, inputs = [torch.nn.Dropout()] * 2, [(torch.ones(3),)] * 2
        drop_out()
        Garbage()
        """,
        "2",
        limit_s=60,
    )


def test_a_finalizer_that_is_collected_in_the_first_map_may_make_one() -> None:
    """It waited for the lock under which its own thread registered the second kernels."""
    assert_prints(
        """
        import gc
        import torch
        from moe_autograd._random import operators

        class Garbage:
            def __init__(self):
                self.itself = self

            def __del__(self):
                operators.install()

        operators.installed.clear()  # the process may have made a map
        for num_allocations in range(0, 40, 2):
            gc.collect()
            Garbage()
            gc.set_threshold(num_allocations + 1)
            operators.install()
            gc.set_threshold(700)
            print(len(operators.installed))
            operators.installed.clear()
        gc.disable()
        operators.install()
        print(gc.isenabled())
        """,
        20 * "1 " + "False",
        limit_s=60,
    )


def test_ctrl_c_while_a_seed_is_promised_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = CallSeeds().seed_of(0)
    monkeypatch.setattr(seeds, "_promised", promised := Interrupted())
    with pytest.raises(KeyboardInterrupt), CallSeeds().promised():
        pass
    assert promised
    assert CallSeeds().seed_of(0) == expected


class Interrupted(dict[int, CallSeeds]):
    def setdefault(self, base: int, owner: CallSeeds) -> CallSeeds:
        super().setdefault(base, owner)
        raise KeyboardInterrupt
