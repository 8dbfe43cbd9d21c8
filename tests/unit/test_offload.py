"""Offloaded experts: what they refuse, what is kept and for how long, what is read ahead."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from experts_server.hosting.offloading import OffloadMemory
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.offload.stores import RamStore
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import ConfigError
from tests.support.stores import WatchedStore


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_experts_have_no_parameters_and_a_generator_is_taken_one_by_one() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def make() -> nn.Module:
        assert sum(one() is not None for one in alive) == 0, (
            "the weights of those before are gone from the modules"
        )
        linear = nn.Linear(8, 8, bias=False)
        alive.append(weakref.ref(linear.weight.data.untyped_storage()))
        return linear

    experts = OffloadedExperts((make() for _ in range(10)), sgd, max_resident_bytes=600)
    assert len(experts) == 10
    assert list(experts[3].parameters()) == []
    assert "expert-00003, 256 bytes of weights" in repr(experts[3])
    assert experts.resident_bytes <= 600


def test_bad_arguments() -> None:
    weights = nn.Linear(2, 2).parameters()
    with pytest.raises(
        TypeError, match=r"expected optimizer to make one from an expert's parameters, got SGD[.] Pass"
    ):
        OffloadedExperts([nn.Linear(2, 2)], torch.optim.SGD(weights), max_resident_bytes=1000)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected at least one expert, got none"):
        OffloadedExperts([], sgd, max_resident_bytes=100)
    with pytest.raises(
        ValueError, match="expected max_resident_bytes or beside, got max_resident_bytes=None"
    ):
        OffloadedExperts([nn.Linear(2, 2)], sgd)
    with pytest.raises(TypeError, match="expected max_resident_bytes in bytes, got '1GB'"):
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes="1GB")  # type: ignore[arg-type]
    for num_microbatches in (0, 1.5):
        with pytest.raises(
            ValueError, match=rf"expected a whole num_microbatches .* or None, got {num_microbatches}"
        ):
            OffloadedExperts(
                [nn.Linear(2, 2)], sgd, max_resident_bytes=100, num_microbatches=num_microbatches
            )  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected max_resident_bytes of at least 48.*, got nan"):
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected max_resident_bytes of at least 512.*, got 300"):
        OffloadedExperts([nn.Linear(8, 8, bias=False)], sgd, max_resident_bytes=300)
    with pytest.raises(ValueError, match="expected update='on_step' or 'on_backward', got 'later'"):
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=100, update="later")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("store", "error", "text"),
    [
        (
            "rma",
            ValueError,
            r"""expected store="ram" or a folder, got 'rma'\. Of a folder .* pass Path\('rma'\)""",
        ),
        ("RAM", ValueError, "got 'RAM'"),
        ("~/experts", ValueError, r"a folder, written out, got '~/experts'.*expanduser"),
        (Path("~"), ValueError, "a folder, written out, got '~'"),
        ("", ValueError, "a folder, written out, got ''"),
        (None, TypeError, r'expected store="ram", a folder or a Store, got NoneType'),
    ],
)
def test_a_store_that_is_none_or_a_slip_makes_no_folder(
    store: Any, error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000, store=store)
    assert not list(tmp_path.iterdir())


def test_a_folder_may_have_any_name_that_is_given_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for store in (Path("rma"), "./arm", "disk"):
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000, store=store).close()
        assert Path(store, "resident-store").is_dir()


def test_beside_others_there_is_no_store_of_ones_own(tmp_path: Path) -> None:
    with (
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000) as experts,
        pytest.raises(ValueError, match="expected no store with beside"),
    ):
        OffloadedExperts([nn.Linear(2, 2)], sgd, beside=experts, store=tmp_path)


@pytest.mark.parametrize("made", [None, 3])
def test_a_function_that_returns_no_optimizer_is_refused_before_anything_is_trained(made: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"expert-00000: expected a torch\.optim\.Optimizer .*, got {type(made).__name__}"
    ):
        OffloadedExperts([nn.Linear(2, 2)], lambda parameters: made, max_resident_bytes=1000)


@pytest.mark.parametrize(
    ("experts", "text"),
    [
        (nn.Linear(2, 2), r"expected several modules, got one Linear\. Pass a list"),
        (
            [nn.Linear(2, 2), torch.relu],
            r"expected every expert to be an nn\.Module, got .*relu.* \(index=1\)",
        ),
        ([nn.Linear], r"got <class .*Linear'> \(index=0\).* of a class, pass an instance"),
        ({"a": nn.Linear(2, 2)}, r"got 'a' \(index=0\).* of a mapping its values"),
    ],
)
def test_experts_that_are_no_modules(experts: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        OffloadedExperts(experts, sgd, max_resident_bytes=1000)


def test_a_folder_belongs_to_one_until_he_closes_or_goes(tmp_path: Path) -> None:
    def build() -> OffloadedExperts:
        return OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000, store=tmp_path)

    first = build()
    with pytest.raises(
        RuntimeError, match=r"resident-store: expected a folder that nobody uses, got one in use"
    ):
        build()
    with pytest.raises(ConfigError, match=r"offload\.store .* expected it to be free"):
        OffloadMemory(1000, tmp_path)
    first.close()
    second = build()
    with pytest.raises(RuntimeError, match="expected open experts, got closed ones"):
        first[0](torch.ones(1, 2))
    del second
    gc.collect()
    build().close()


def test_a_layer_outlives_the_one_that_it_was_built_beside(tmp_path: Path) -> None:
    first = OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000, store=tmp_path)
    second = OffloadedExperts([nn.Linear(2, 2)], sgd, beside=first)
    del first
    gc.collect()
    second[0](torch.ones(1, 2)).sum().backward()
    second.step()
    second.checkpoint()
    second.close()


def test_a_graph_outlives_the_experts_that_made_it() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    y = OffloadedExperts([nn.Identity()], sgd, max_resident_bytes=1000, num_microbatches=1)[0](x * 2)
    gc.collect()
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((1, 2), 2.0))


@pytest.mark.parametrize("num_microbatches", [None, 1])
def test_a_graph_does_not_hold_the_memory_that_the_weights_lay_in(num_microbatches: int | None) -> None:
    experts = OffloadedExperts(
        [nn.Linear(8, 8), nn.Linear(16, 16)], sgd, max_resident_bytes=2200, num_microbatches=num_microbatches
    )
    y = experts[0](torch.ones(1, 8, requires_grad=True))
    buffer = weakref.ref(experts._held[0].weights.buffer)
    experts.residency.flush()
    with experts.residency.hold(experts._held[1].parts_to_update()):
        assert experts._held[0].weights.buffer is None
    assert buffer() is None
    y.sum().backward()


class _SeesCasts(TorchDispatchMode):
    """Notes copies of weights in lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape == (8, 8):
            self.storages.append(weakref.ref(result.untyped_storage()))
        return result


@pytest.mark.parametrize("way", ["no_grad", "recompute", "microbatches", "plain"])
def test_what_autocast_converts_of_weights_goes_with_their_call(way: str) -> None:
    """It had been cached until the block of autocast ended: half the weights of all experts were in memory."""
    experts = OffloadedExperts(
        (nn.Linear(8, 8) for _ in range(6)),
        sgd,
        max_resident_bytes=1000,
        num_microbatches=1 if way == "microbatches" else None,
    )
    casts, x = _SeesCasts(), torch.ones(1, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with casts, torch.set_grad_enabled(way != "no_grad"):
            results = parallel_apply(list(experts), [(x,)] * 6, recompute=way == "recompute")
        num_alive = sum(storage() is not None for storage in casts.storages)
        assert torch.is_autocast_cache_enabled()
    assert len(casts.storages) == 6
    assert num_alive == (6 if way == "plain" else 0), "of these the graph saves what it converted"
    if way != "no_grad":
        torch.stack(results).sum().backward()


def test_an_expert_without_parameters_is_called_and_not_trained() -> None:
    experts = OffloadedExperts([nn.Identity(), nn.Linear(2, 2)], sgd, max_resident_bytes=1000)
    x = torch.ones(1, 2, requires_grad=True)
    sum(expert(x) for expert in experts).sum().backward()  # type: ignore[union-attr]
    experts.step()
    assert len(experts.optimizers) == 1
    torch.testing.assert_close(x.grad, 1 + torch.ones(2) @ (experts.state_dict(1)["weight"] + 0.1)[None])


def test_hooks_that_would_never_run_are_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module.bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"got 1 on bias of expert-00000, whose gradients are not in .grad"):
        OffloadedExperts([module], sgd, max_resident_bytes=1000)


def test_optimizer_state_that_does_not_fit_is_told_at_the_first_step() -> None:
    experts = OffloadedExperts([nn.Linear(8, 8, bias=False)], torch.optim.Adam, max_resident_bytes=600)
    experts[0](torch.ones(1, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"expected max_resident_bytes of at least 1028, .* got 600"):
        experts.step()


def test_parallel_apply_calls_them_together() -> None:
    torch.manual_seed(0)
    experts = OffloadedExperts((nn.Linear(8, 8) for _ in range(6)), sgd, max_resident_bytes=2 * 288 + 100)
    x = torch.randn(4, 8, requires_grad=True)
    outputs = parallel_apply(list(experts), [(x * i,) for i in range(6)])
    torch.stack(outputs).sum().backward()
    assert x.grad is not None
    for i in range(6):
        gradient = experts.gradients(i)["weight"]
        assert gradient is not None
        torch.testing.assert_close(gradient, (x.detach() * i).sum(0).expand(8, 8))


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("ending", ["backward", "dropped"])
def test_activations_go_with_the_graph(num_microbatches: int | None, ending: str) -> None:
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            alive.append(weakref.ref(h.untyped_storage()))
            return self.linear(h)

    experts = OffloadedExperts([Watched()], sgd, max_resident_bytes=5000, num_microbatches=num_microbatches)
    known = experts.residency.known_bytes
    y = experts[0](torch.ones(4, 8))
    if num_microbatches is None:
        assert alive[0]() is not None
    else:
        assert [one() for one in alive] == [None, None], "they moved into parts"
        assert experts.residency.known_bytes > known
    if ending == "backward":
        y.sum().backward()
    else:
        del y
    assert all(one() is None for one in alive)
    assert experts.residency.known_bytes == known


def test_never_more_than_one_micro_batch_of_activations_is_outside_of_the_limit() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            y = self.linear(x).exp().sin()
            alive.append(weakref.ref(y))
            most = max(most, sum(one() is not None for one in alive))
            return y

    experts = OffloadedExperts(
        (Watched() for _ in range(3)), sgd, max_resident_bytes=1500, num_microbatches=8, store=RamStore()
    )
    x = torch.randn(32, 8)
    y = experts.call_together(list(experts), [(x,)] * 3, [{}] * 3)
    assert experts.residency.known_bytes > 5 * 1500
    torch.stack(y).sum().backward()
    assert most == 1
    assert experts.residency.peak_bytes <= 1500


def test_with_updates_in_the_backward_gradients_never_go_to_the_store() -> None:
    store = WatchedStore()
    experts = OffloadedExperts(
        (nn.Linear(8, 8, bias=False) for _ in range(6)),
        sgd,
        max_resident_bytes=3 * 256,
        store=store,
        update="on_backward",
    )
    with experts:
        for _ in range(2):
            sum(parallel_apply(list(experts), [(torch.ones(1, 8),)] * 6)).sum().backward()
    assert not any("gradients" in event for event in store.events)
    assert "write expert-00003.weights" in store.events


def test_close_ends_the_threads() -> None:
    others = set(threading.enumerate())
    experts = OffloadedExperts((nn.Linear(8, 8) for _ in range(4)), sgd, max_resident_bytes=700)
    with experts:
        sum(expert(torch.ones(1, 8)) for expert in experts).sum().backward()
        experts.step()
        experts.residency.flush()
        mine = set(threading.enumerate()) - others
        assert mine
    assert not any(thread.is_alive() for thread in mine)


RETURNING = """
import re, sys, torch
from moe_autograd.autograd.offload import return_freed_memory_at_once


def resident_kb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

assert return_freed_memory_at_once()
for _ in range(2):  # the C library would put the second into its heap, having seen the first freed
    blocks = [torch.ones(1_000_000) for _ in range(20)]
    held = resident_kb()
    del blocks[:-1]  # the last would keep the others' heap
sys.exit(0 if held - resident_kb() > 60_000 else 3)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_returned_at_once_where_that_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RETURNING], timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
