"""Programs that call modules, for `parallel_apply`: each a use that plain PyTorch allows.

A program takes something called like `parallel_apply` and returns what is to be compared: outputs, gradients,
buffers, counts. Modules are built from a seed, so that two runs start alike; float64 throughout.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from tests.support.comparison import MapFunction, loss_of
from tests.support.functions_context import SavesInput

NUM_CALLS = 4
has_grads_before = False  # whether what is made has a `.grad` already, as after a first micro-batch
PROGRAMS: list[Callable[[MapFunction], Any]] = []


def program(function: Callable[[MapFunction], Any]) -> Callable[[MapFunction], Any]:
    PROGRAMS.append(function)
    return function


class Two(NamedTuple):
    first: Tensor
    second: Any


def seeded(make: Callable[[], nn.Module], count: int = NUM_CALLS) -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [_as_before(make().double()) for _ in range(count)]


def _as_before(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        if has_grads_before and p.is_floating_point():
            p.grad = torch.full_like(p, 0.25)
    return module


def leaves(count: int = NUM_CALLS, *shape: int, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(shape or (3, 4), generator=generator, dtype=torch.float64) for _ in range(count)]
    for x in made:
        x.requires_grad_(requires_grad)
        if has_grads_before and requires_grad:
            x.grad = torch.full_like(x, 0.25)
    return made


def parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters()]


def gradients_of_a_few(apply: MapFunction, *, wanted: str, how: str) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    weights = parameters(modules)
    chosen = {
        "inputs": xs,
        "parameters": weights,
        "one parameter": [weights[3]],
        "one input": [xs[2]],
        "a mixture": [xs[0], weights[1], weights[6]],
    }[wanted]
    loss = loss_of(apply(modules, [(x * 1,) for x in xs]))
    grads = torch.autograd.grad(loss, chosen) if how == "grad" else loss.backward(inputs=chosen)
    return grads, [x.grad for x in [*xs, *weights]]


def finish(outputs: Any, *tensors: Tensor) -> Any:
    """Go backward through everything and return the outputs (plain) and the gradients of `tensors`."""
    loss_of(tree_leaves(outputs)).backward()
    kept = [x.detach().clone() if isinstance(x, Tensor) else x for x in tree_leaves(outputs)]
    return (
        kept,
        [x.requires_grad for x in tree_leaves(outputs) if isinstance(x, Tensor)],
        [x.grad for x in tensors],
    )


@program
def experts(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))), leaves()
    return finish(apply(modules, [(x,) for x in xs]), *xs, *parameters(modules))


@program
def one_module_several_times(apply: MapFunction) -> Any:
    (module,), xs = seeded(lambda: nn.Linear(4, 4), 1), leaves()
    return finish(apply([module] * NUM_CALLS, [(x,) for x in xs]), *xs, *module.parameters())


@program
def one_input_for_all(apply: MapFunction) -> Any:
    modules, (x,) = seeded(lambda: nn.Linear(4, 4)), leaves(1)
    return finish(apply(modules, [(x,)] * NUM_CALLS), x, *parameters(modules))


@program
def bare_tensors_and_lists_as_inputs(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    return finish(apply(modules, [xs[0], [xs[1]], (xs[2],), xs[3]]), *xs, *parameters(modules))


@program
def lambdas_over_leaves(apply: MapFunction) -> Any:
    weights, xs = leaves(NUM_CALLS, 4, 4), leaves()
    return finish(apply([lambda x, w=w: x @ w for w in weights], [(x,) for x in xs]), *xs, *weights)


@program
def closures_over_tensors_with_history(apply: MapFunction) -> Any:
    (weight, scale), xs = leaves(2, 4), leaves()
    hidden, shared = weight.exp(), scale.sin()

    def make(i: int) -> Callable[[Tensor], Tensor]:
        own = hidden * (i + 1)
        return lambda x: x * own + shared

    return finish(apply([make(i) for i in range(NUM_CALLS)], [(x,) for x in xs]), *xs, weight, scale)


@program
def closures_over_a_leaf_and_what_was_computed_from_it(apply: MapFunction) -> Any:
    """Also over two tensors with history of which one leads to the other; and one serves outside as well."""
    (weight,), xs = leaves(1, 4), leaves()
    hidden = weight.exp()
    deeper = hidden.sin()
    calls = [
        lambda x: x * weight + x.sin() * hidden,
        lambda x: x * hidden * deeper,
        lambda x: x * hidden,
        lambda x: (x * deeper + weight).exp(),
    ]
    return finish([*apply(calls, [(x,) for x in xs]), hidden * 2, deeper * 3], *xs, weight)


@program
def tensors_with_history_in_an_object(apply: MapFunction) -> Any:
    (weight,), xs = leaves(1, 4), leaves()
    holder = types.SimpleNamespace(hidden=weight.exp())
    return finish(apply([lambda x: x * holder.hidden] * NUM_CALLS, [(x,) for x in xs]), *xs, weight)


@program
def tensors_with_history_on_a_module(apply: MapFunction) -> Any:
    """As hypernetworks do, and `torch.nn.utils.parametrize.cached`."""

    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * self.hidden  # type: ignore[operator]  # an attribute that nn.Module types loosely

    (weight,), xs = leaves(1, 4), leaves()
    modules = [Scales() for _ in range(NUM_CALLS)]
    hidden = weight.exp()
    for module in modules:
        module.hidden = hidden  # type: ignore[assignment]  # the same
    return finish(apply(modules, [(x,) for x in xs]), *xs, weight)


@program
def functional_calls_with_computed_parameters(apply: MapFunction) -> Any:
    (module,), xs, (weight,) = seeded(lambda: nn.Linear(4, 4, bias=False), 1), leaves(), leaves(1, 4, 4)
    computed = {"weight": weight.tanh()}
    calls = [lambda x: functional_call(module, computed, (x,))] * NUM_CALLS
    return finish(apply(calls[:1], [(xs[0],)]), xs[0], weight)


@program
def pytrees_in_and_out(apply: MapFunction) -> Any:
    def call(nested: dict[str, Any], other: Two, *, scale: float) -> dict[str, Any]:
        product = nested["a"][0] * other.first * scale
        return {
            "sum": [product + nested["a"][1]],
            "two": Two(other.first * 2, ("text", None, 3)),
            "none": None,
        }

    xs, ys = leaves(), leaves(NUM_CALLS, 4)
    inputs = [({"a": [x, 1.5]}, Two(y, None)) for x, y in zip(xs, ys, strict=True)]
    outputs = apply([call] * NUM_CALLS, inputs, [{"scale": i + 0.5} for i in range(NUM_CALLS)])
    return [type(output["two"]) for output in outputs], finish(outputs, *xs, *ys)


@program
def tensors_in_keyword_arguments(apply: MapFunction) -> Any:
    modules, xs, ys = seeded(lambda: nn.Bilinear(4, 4, 2)), leaves(), leaves()
    outputs = apply(modules, [(x,) for x in xs], [{"input2": y} for y in ys])
    return finish(outputs, *xs, *ys, *parameters(modules))


@program
def batch_norm_updates_its_buffers(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.BatchNorm1d(4)), leaves()
    said = finish(apply(modules, [(x,) for x in xs]), *xs, *parameters(modules))
    return said, [list(module.buffers()) for module in modules]


@program
def only_parameters_need_gradients(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves(requires_grad=False)
    return finish(apply(modules, [(x,) for x in xs]), *parameters(modules))


@program
def frozen_parameters(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    for module in modules[::2]:
        module.requires_grad_(False)
    modules[1].weight.requires_grad_(False)
    return finish(apply(modules, [(x,) for x in xs]), *xs, *parameters(modules))


@program
def nothing_needs_a_gradient(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4).requires_grad_(False)), leaves(requires_grad=False)
    return apply(modules, [(x,) for x in xs])


@program
def some_calls_need_no_gradient(apply: MapFunction) -> Any:
    xs = leaves()
    xs[2] = xs[2].detach()
    outputs = apply([torch.sin] * NUM_CALLS, [(x,) for x in xs])
    return [output.requires_grad for output in outputs], finish(outputs, *xs)


@program
def parameters_shared_between_modules(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    for module in modules[1:]:
        module.weight = modules[0].weight
    return finish(apply(modules, [(x,) for x in xs]), *xs, *parameters(modules))


@program
def gradients_gather_over_two_maps(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    first = finish(apply(modules, [(x,) for x in xs]), *xs, *parameters(modules))
    return first, finish(apply(modules, [(x * 2,) for x in xs]), *xs, *parameters(modules))


@program
def modules_that_change_their_input_in_place(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))), leaves()
    middles = [x * 2 for x in xs]
    outputs = apply(modules, [(m,) for m in middles])
    return finish([*outputs, *middles], *xs, *parameters(modules))


@program
def outputs_changed_in_place(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    outputs = apply(modules, [(x,) for x in xs])
    outputs[1].mul_(2)
    outputs[2].add_(outputs[0])
    return finish(outputs, *xs, *parameters(modules))


@program
def a_saved_output_changed_in_place(apply: MapFunction) -> Any:
    xs = leaves()
    outputs = apply([torch.exp] * NUM_CALLS, [(x,) for x in xs])
    outputs[1].mul_(2)
    return finish(outputs, *xs)


@program
def a_saved_input_changed_in_place(apply: MapFunction) -> Any:
    xs = leaves()
    middles = [x * 1 for x in xs]
    outputs = apply([torch.sin] * NUM_CALLS, [(m,) for m in middles])
    middles[3].mul_(2)
    return finish(outputs, *xs)


@program
def parts_of_one_tensor_as_inputs(apply: MapFunction) -> Any:
    modules, (x,) = seeded(lambda: nn.Linear(4, 4)), leaves(1, 8, 4)
    outputs = apply(modules, [(part,) for part in (x * 1).chunk(NUM_CALLS)])
    return finish(torch.cat(outputs), x, *parameters(modules))


@program
def a_base_changed_after_its_part_was_used(apply: MapFunction) -> Any:
    (x,) = leaves(1, 8, 4)
    base = x * 1
    outputs = apply([torch.sin] * 2, [(base[:4],), (base[4:],)])
    base.mul_(2)
    return finish(outputs, x)


@program
def callables_that_return_what_they_have(apply: MapFunction) -> Any:
    """Their input, a view of it, a parameter, a constant, a detached tensor, nothing."""
    (weight, *_), xs = leaves(1, 4), leaves(6)
    constant = torch.ones(2, dtype=torch.float64)
    calls: list[Any] = [
        nn.Identity(),
        lambda x: x[1:],
        lambda x: (weight, x * weight),
        lambda x: constant,
        lambda x: (x.detach(), x + 1),
        lambda x: None,
    ]
    return finish(apply(calls, [(x,) for x in xs]), weight, *xs)


@program
def layers_of_many_kinds(apply: MapFunction) -> Any:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.LSTM(4, 3, batch_first=True),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.Conv1d(3, 2, 2),
        lambda: nn.GRUCell(4, 4),
        lambda: nn.LayerNorm(4),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ]
    modules = [module for kind in kinds for module in seeded(kind, 1)]
    xs = leaves(6, 2, 3, 4)
    xs[3] = leaves(1, 3, 4)[0]
    return finish(apply(modules, [(x,) for x in xs]), *xs, *parameters(modules))


@program
def sparse_embeddings(apply: MapFunction) -> Any:
    modules = seeded(lambda: nn.Embedding(6, 4, sparse=True))
    rows = [torch.tensor([1, 5, 1]) + i % 2 * 0 for i in range(NUM_CALLS)]
    return finish(apply(modules, [(row,) for row in rows]), *parameters(modules))


@program
def autograd_functions_inside(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    calls = [lambda x, m=m: SavesInput.apply(m(x)) for m in modules]
    return finish(apply(calls, [(x,) for x in xs]), *xs, *parameters(modules))


@program
def maps_inside_maps(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

    def inner(x: Tensor) -> Tensor:
        return torch.stack(apply(modules, [(x * i,) for i in range(NUM_CALLS)])).sum(0)

    return finish(apply([inner] * NUM_CALLS, [(x,) for x in xs]), *xs, *parameters(modules))


@program
def state_kept_on_a_module(apply: MapFunction) -> Any:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_seen = 0
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.num_seen += len(x)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x * self.mean

    modules, xs = seeded(Counts), leaves()
    apply(modules, [(x,) for x in xs])
    said = finish(apply(modules, [(x,) for x in xs]), *xs)
    return said, [(module.num_seen, module.mean) for module in modules]
