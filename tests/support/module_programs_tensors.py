"""Programs about what tensors are beside numbers: their shapes, classes, attributes, and the mode they were made in."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from tests.support.comparison import MapFunction, facts
from tests.support.module_programs import NUM_CALLS, finish, leaves, parameters, program, seeded


@program
def shapes_in_and_out(apply: MapFunction) -> Any:
    def call(x: Tensor, shape: torch.Size) -> Any:
        return x.reshape(shape), x.shape, {"of": [x.shape]}, isinstance(shape, torch.Size)

    xs = leaves()
    outputs = apply([call] * NUM_CALLS, [(x, torch.Size([4, 3])) for x in xs])
    return [output[1:] for output in outputs], finish([output[0] for output in outputs], *xs)


@program
def containers_of_many_kinds(apply: MapFunction) -> Any:
    def call(given: collections.OrderedDict[str, Any]) -> Any:
        made: collections.OrderedDict[str, Any] = collections.OrderedDict(z=given["x"] * 2, a=None)
        made["m"] = collections.defaultdict(list, {"q": [given["d"][0].sin()]})
        made["d"] = collections.deque([given["x"]], maxlen=3)
        made["max"] = torch.max(given["x"], dim=1)
        return made

    xs = leaves()
    given = [collections.OrderedDict(x=x, d=collections.deque([x * 2])) for x in xs]
    outputs = apply([call] * NUM_CALLS, [(one,) for one in given])
    kinds = [(list(made), type(made["m"]), made["d"].maxlen, type(made["max"])) for made in outputs]
    return kinds, [made["d"][0] is x for made, x in zip(outputs, xs, strict=True)], finish(outputs, *xs)


@program
def packed_sequences(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.LSTM(4, 3, batch_first=True)), leaves(NUM_CALLS, 2, 3, 4)
    packed = [pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True) for x in xs]
    outputs = apply(modules, [(one,) for one in packed])
    return finish([(pad_packed_sequence(y)[0], state) for y, state in outputs], *xs, *parameters(modules))


@program
def attributes_of_inputs(apply: MapFunction) -> Any:
    """Read by the call, and put there by it, whether the input needs a gradient or not."""

    def call(x: Any, y: Any) -> Tensor:
        x.seen, y.seen = True, True
        return x * x.scale * y.scale

    inputs: list[Any] = [*leaves(), *leaves(requires_grad=False)]
    for i, x in enumerate(inputs):
        x.scale = i + 2
    pairs = list(zip(inputs[:NUM_CALLS], inputs[NUM_CALLS:], strict=True))
    said = finish(apply([call] * NUM_CALLS, pairs), *inputs[:NUM_CALLS])
    return said, [vars(x) for x in inputs]


@program
def leaves_and_tensors_of_a_closure_returned_as_they_are(apply: MapFunction) -> Any:
    """They are the very objects: a leaf gets its gradient, and what changes one of them changes the other."""
    (module,), (x, weight, scale) = seeded(lambda: nn.Linear(4, 4), 1), leaves(3)
    hidden = weight * 2
    part = (scale * 2)[1:]

    def call(x: Tensor) -> Any:
        made = torch.ones(4, dtype=torch.float64, requires_grad=True)
        return module.weight, weight, hidden, part, made, x @ module.weight * made

    (returned,) = apply([call], [(x,)])
    held = [module.weight, weight, hidden, part]
    same = [one is other for one, other in zip(returned, held, strict=False)]
    returned[2].mul_(3)
    returned[3].mul_(5)
    said = finish([*returned, hidden, part], x, weight, scale, *parameters([module]))
    return same, said, returned[4].is_leaf, returned[4].grad


@program
def a_computed_weight_that_modules_hold_in_several_places(apply: MapFunction) -> Any:
    """As an attribute and as a parameter, as with `FullyShardedDataParallel`; and in parts that stand twice."""
    modules, xs, weights = seeded(lambda: nn.Linear(4, 4)), leaves(), leaves(NUM_CALLS, 4, 4)
    for module, weight in zip(modules, weights, strict=True):
        del module.weight
        module.weight = weight * 2
        module._parameters["weight"] = module.weight  # type: ignore[assignment]
        module.list = [module.weight]  # type: ignore[assignment]
    calls = [*modules[:2], nn.Sequential(modules[2], modules[2]), lambda x: modules[3](x)]
    return finish(apply(calls, [(x,) for x in xs]), *xs, *weights, *[m.bias for m in modules])


@program
def views_of_one_row_or_column(apply: MapFunction) -> Any:
    """Their strides are those of what they show, though any would do for one."""
    xs = leaves()
    calls = [lambda x: x[:1], lambda x: x[:, :1].t(), lambda x: x[None, 0], lambda x: (x * 2)[:1].unbind(1)]
    outputs = apply(calls, [(x,) for x in xs])
    return [t.stride() for t in tree_leaves(outputs)], finish(outputs, *xs)


@program
def what_is_returned_in_inference_mode(apply: MapFunction) -> Any:
    """An input that needs a gradient still does, as do its views and a module's parameters."""
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    given = [*xs[:2], *[x * 2 for x in xs[2:]]]
    calls = [lambda x, m=m: (x, x[1:], x * 2, m.weight, m(x)) for m in modules]
    with torch.inference_mode():
        outputs = apply(calls, [(x,) for x in given])
    same = [(o[0] is x, o[3] is m.weight) for o, x, m in zip(outputs, given, modules, strict=True)]
    return same, [[facts(t) for t in output] for output in outputs]


@program
def normal_mode_inside_inference_mode(apply: MapFunction) -> Any:
    def call(x: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return x.clone() * 2

    xs = leaves()
    with torch.inference_mode():
        outputs = apply([call] * NUM_CALLS, [(x,) for x in xs])
    return finish(outputs, *xs)


@program
def grad_modes_inside(apply: MapFunction) -> Any:
    def call(x: Tensor) -> Any:
        with torch.no_grad():
            off = x * 2
        with torch.enable_grad():
            on = x * 3
        with torch.inference_mode():
            inference = x * 4
        return off, on, inference, torch.is_grad_enabled()

    xs = leaves()
    said = finish(apply([call] * NUM_CALLS, [(x,) for x in xs]), *xs)
    with torch.no_grad():
        outputs = apply([call] * NUM_CALLS, [(x,) for x in xs])
    return said, finish(outputs, *xs)


@program
def transforms_inside(apply: MapFunction) -> Any:
    xs = leaves(4, 3)
    calls = [
        torch.func.vmap(lambda row: row.sin() * 2),
        torch.func.grad(lambda x: (x**3).sum()),
        torch.func.jacrev(torch.sin),
        torch.func.functionalize(lambda x: x.clone().mul_(2)),
    ]
    try:
        return finish(apply(calls, [(x,) for x in xs]), *xs)
    except RuntimeError as error:  # under checkpoint
        return str(error)


@program
def tensors_of_a_class_of_ones_own(apply: MapFunction) -> Any:
    xs = leaves()
    given = [(x * 1).as_subclass(Own) for x in xs]
    outputs = apply([lambda x: (x * 2, type(x).__name__)] * NUM_CALLS, [(x,) for x in given])
    kinds = [(type(y).__name__, name) for y, name in outputs]
    return kinds, finish([y.as_subclass(Tensor) for y, _ in outputs], *xs)


class Own(Tensor):
    pass


@program
def parameters_and_meta_tensors_as_inputs(apply: MapFunction) -> Any:
    given = [nn.Parameter(x) for x in leaves(requires_grad=False)]
    said = finish(apply([lambda p: p * 2] * NUM_CALLS, [(p,) for p in given]), *given)
    shapes = [torch.empty(3, device="meta", requires_grad=True) for _ in range(NUM_CALLS)]
    outputs = apply([lambda x: x * 2] * NUM_CALLS, [(x,) for x in shapes])
    grads = torch.autograd.grad([y.sum() for y in outputs], shapes)
    return said, [(str(grad.device), tuple(grad.shape)) for grad in grads]


@program
def containers_that_calls_put_something_into(apply: MapFunction) -> Any:
    """The caller's own, given to all calls or to each its own; and what is returned is the very object."""

    def call(x: Tensor, seen: list[float], *, own: dict[str, Any]) -> Any:
        seen.append(x.detach().sum().item())
        own["inner"]["double"] = own["number"] * 2
        return x * own["number"], own

    xs, seen = leaves(), list[float]()
    owns = [{"number": i, "inner": {}} for i in range(NUM_CALLS)]
    outputs = apply([call] * NUM_CALLS, [(x, seen) for x in xs], [{"own": own} for own in owns])
    same = [own is given for (_, own), given in zip(outputs, owns, strict=True)]
    seen.sort()
    return same, finish([y for y, _ in outputs], *xs), owns


@program
def inputs_that_begin_to_require_gradients_beside_what_is_no_tensor(apply: MapFunction) -> Any:
    """As in networks of physics: gradients by positions are computed of points that are data to everybody else."""

    def forces(given: Any, module: Any = None, *, scale: float = 1.0) -> Tensor:
        x = given["positions"] if isinstance(given, dict) else given
        x.requires_grad_()
        energy = (linear(x) if module is None else module(x)).tanh().sum() * scale
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    (linear,), xs = seeded(lambda: nn.Linear(4, 4), 1), [x.detach() for x in leaves(4)]
    inputs = [(xs[0],), (xs[1], linear), (xs[2], None), ({"positions": xs[3]},)]
    outputs = apply([forces] * 4, inputs, [{}, {}, {"scale": 2.0}, {}])
    return finish(outputs, *xs, *linear.parameters())


def losses_put_into_a_list_of_the_callers(apply: MapFunction) -> Any:
    def call(x: Tensor, losses: list[Tensor]) -> Tensor:
        losses.append(x.exp().sum())
        return x * 2

    xs, losses = leaves(), list[Tensor]()
    outputs = apply([call] * NUM_CALLS, [(x, losses) for x in xs])
    return len(losses), finish([*outputs, sum(losses)], *xs)


def losses_put_into_a_list_that_holds_some(apply: MapFunction) -> Any:
    def call(x: Tensor, losses: list[Tensor]) -> Tensor:
        losses.append(x.exp().sum())
        return x * 2

    xs = leaves()
    losses = [(xs[0] * 3).sum()]
    outputs = apply([call] * NUM_CALLS, [(x, losses) for x in xs])
    return len(losses), finish([*outputs, sum(losses)], *xs)


def results_put_into_a_dict_among_the_inputs(apply: MapFunction) -> Any:
    def call(features: dict[str, Tensor]) -> None:
        features["x"] = features["x"] * 2

    xs = leaves()
    given = [{"x": x} for x in xs]
    apply([call] * NUM_CALLS, [(features,) for features in given])
    return finish([features["x"] for features in given], *xs)


CONTAINERS = [losses_put_into_a_list_of_the_callers, losses_put_into_a_list_that_holds_some]
CONTAINERS += [results_put_into_a_dict_among_the_inputs]
