"""Programs whose calls return objects that are no pytrees: dataclasses, distributions, others.

Registered with those of `module_programs`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import (
    AffineTransform,
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from tests.support.comparison import MapFunction, facts
from tests.support.module_programs import NUM_CALLS, finish, leaves, parameters, program, seeded


@dataclasses.dataclass
class Output:
    hidden: Tensor
    scores: Any = None
    total: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.total = self.hidden.sum()


class Longer(Output):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Any
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    first: Any


@dataclasses.dataclass(frozen=True, slots=True)
class MoreSlots(Slots):
    second: Any


class ModelOutput(collections.OrderedDict[str, Any]):
    """As those of Hugging Face: a dataclass and a dictionary, which holds what is not `None`."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[key] for key in self.keys())


class CausalOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


def types_in(value: Any) -> Any:
    return type(value), [type(held) for held in vars(value).values()]


@program
def results_in_dataclasses(apply: MapFunction) -> Any:
    """With defaults, `init=False`, inheritance, attributes of no field; frozen, nested."""

    def call(module: nn.Module, x: Tensor) -> Frozen:
        y = module(x)
        more = Longer(y.sin(), [y.exp(), {"a": y.cos()}])
        more.extra = y * 2  # type: ignore[attr-defined]
        return Frozen(Output(y, scores=more), "frozen")

    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    outputs = apply([call] * NUM_CALLS, list(zip(modules, xs, strict=True)))
    held = [[o.inner.hidden, o.inner.total, *vars(o.inner.scores).values()] for o in outputs]
    said = [(o.name, types_in(o.inner), o.inner.scores.scores[1].keys()) for o in outputs]
    return finish(held, *xs, *parameters(modules)), [s for one in said for s in one[:2]], facts(held[0][0])


@program
def results_in_dataclasses_with_slots(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    calls = [lambda x, m=m: MoreSlots(m(x), Slots((x, x.sin(), 3))) for m in modules]
    outputs = apply(calls, [(x.exp(),) for x in xs])
    return finish([(one.first, *one.second.first) for one in outputs], *xs, *parameters(modules))


@program
def results_in_a_dictionary_that_is_a_dataclass(apply: MapFunction) -> Any:
    def call(module: nn.Module, x: Tensor) -> CausalOutput:
        layers = (x, x.tanh(), module(x))
        return CausalOutput(loss=layers[-1].mean(), logits=layers[-1], hidden_states=layers)

    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    outputs = apply([call] * NUM_CALLS, list(zip(modules, [x * 2 for x in xs], strict=True)))
    one = outputs[0]
    is_one = one.logits is one["logits"] is one[1] is one.hidden_states[-1] is one["hidden_states"][-1]
    said = is_one, type(one), list(one), one.attentions
    return finish([[*o.to_tuple()] for o in outputs], *xs, *parameters(modules)), said


@program
def results_in_distributions(apply: MapFunction) -> Any:
    def mixture(y: Tensor) -> Distribution:
        return MixtureSameFamily(Categorical(logits=y), Normal(y.sin(), y.exp()))

    def transformed(y: Tensor) -> Distribution:
        flow = [AffineTransform(y.cos(), y.exp()), TanhTransform(cache_size=1)]
        made = TransformedDistribution(Normal(y, torch.ones_like(y)), flow)
        made.sample_point = made.base_dist.mean  # type: ignore[attr-defined]
        for transform in flow:
            made.sample_point = transform(made.sample_point)  # type: ignore[attr-defined]  # the last one caches it
        return made

    def independent(y: Tensor) -> Distribution:
        return Independent(MultivariateNormal(y, y.T @ y + torch.eye(4, dtype=y.dtype)), 1)

    makes = [independent, transformed, mixture, lambda y: Normal(y, y.exp())]
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    calls = [lambda x, m=m, make=make: make(m(x)) for m, make in zip(modules, makes, strict=True)]
    outputs = apply(calls, [(x,) for x in xs])
    at = torch.full((3, 4), 0.5, dtype=torch.float64)
    logs = [o.log_prob(at[:, 0] if type(o) is MixtureSameFamily else at) for o in outputs]
    means = [o.mean for o in outputs if type(o) is not TransformedDistribution]
    point = outputs[1].sample_point  # the transforms know where it came from
    logs.append(outputs[1].log_prob(point))
    divergence = kl_divergence(outputs[3], Normal(torch.zeros_like(at), torch.ones_like(at)))
    return finish([*logs, *means, divergence], *xs, *parameters(modules)), [type(o) for o in outputs]


@program
def results_in_an_object_of_ones_own(apply: MapFunction) -> Any:
    """Also in containers there, of several kinds; and one that leads to itself."""

    class Rows(list[Any]):
        pass

    def call(module: nn.Module, x: Tensor) -> Any:
        y = module(x)
        result = types.SimpleNamespace(y=y, rows=Rows([y.sin(), (y, [y.exp()])]), by_name={"y": y})
        result.queue = collections.deque([y.cos()])
        result.itself = result
        return {"object": result, "tensor": y * 3}

    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    outputs = apply([call] * NUM_CALLS, list(zip(modules, xs, strict=True)))
    objects = [output["object"] for output in outputs]
    is_one = [
        o.y is o.by_name["y"] is o.rows[1][0] and o.itself is o and type(o.rows) is Rows for o in objects
    ]
    held = [[o.y, o.rows[0], o.rows[1][1][0], *o.queue] for o in objects]
    return finish([held, [output["tensor"] for output in outputs]], *xs, *parameters(modules)), is_one


@program
def results_in_an_object_that_the_module_keeps(apply: MapFunction) -> Any:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            self.last = Output(self.linear(x), x)
            return self.last

    modules, xs = seeded(Keeps), leaves()
    inputs = [x.exp() for x in xs]
    outputs = apply(modules, [(x,) for x in inputs])
    same = [
        (output is module.last, output.scores is x)
        for output, module, x in zip(outputs, modules, inputs, strict=True)
    ]
    return same, finish([[m.last.hidden, m.last.total] for m in modules], *xs, *parameters(modules))


@program
def an_object_among_the_inputs_that_the_call_fills_and_returns(apply: MapFunction) -> Any:
    def call(module: nn.Module, filled: Output) -> Output:
        filled.scores = module(filled.hidden)
        return filled

    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    given = [Output(x.exp()) for x in xs]
    outputs = apply([call] * NUM_CALLS, list(zip(modules, given, strict=True)))
    same = [a is b for a, b in zip(outputs, given, strict=True)]
    return same, finish([[o.hidden, o.scores, o.total] for o in outputs], *xs, *parameters(modules))


@program
def an_object_that_all_calls_fill_and_return(apply: MapFunction) -> Any:
    """Each ties what is its own."""
    filled, lock = types.SimpleNamespace(parts={}), threading.Lock()

    def call(i: int, module: nn.Module, x: Tensor) -> Any:
        y = module(x)
        with lock:
            filled.parts[i] = y.sin()
        return y, filled

    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    inputs = [(i, *both) for i, both in enumerate(zip(modules, xs, strict=True))]
    outputs = apply([call] * NUM_CALLS, inputs)
    same = [found is filled for _, found in outputs]
    parts = [filled.parts[i] for i in range(NUM_CALLS)]
    return same, finish([[y for y, _ in outputs], parts], *xs, *parameters(modules))


@program
def changed_inputs_and_views_of_them_in_an_object(apply: MapFunction) -> Any:
    def call(x: Tensor) -> Any:
        x.mul_(2)
        return Slots((x, x[1:], x.sum()))

    xs = leaves()
    middles = [x + 1 for x in xs]
    outputs = apply([call] * NUM_CALLS, [(m,) for m in middles])
    same = [output.first[0] is m for output, m in zip(outputs, middles, strict=True)]
    return same, finish([[*output.first] for output in outputs], *xs)


@program
def results_that_hold_themselves(apply: MapFunction) -> Any:
    def call(module: nn.Module, x: Tensor) -> Any:
        result: dict[str, Any] = {"y": module(x), "x": x}
        result["me"] = (result, [result["y"].sin()])
        return result

    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    outputs = apply([call] * NUM_CALLS, [*zip(modules, xs, strict=True)])
    same = [output["me"][0] is output and output["x"] is x for output, x in zip(outputs, xs, strict=True)]
    return same, finish([[output["y"], *output["me"][1]] for output in outputs], *xs, *parameters(modules))


@program
def results_at_the_bottom_of_many_lists(apply: MapFunction) -> Any:
    def call(module: nn.Module, x: Tensor) -> Any:
        result: Any = module(x)
        for _ in range(2000):
            result = [result]
        return result

    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    outputs = apply([call] * NUM_CALLS, [*zip(modules, xs, strict=True)])
    for _ in range(2000):
        outputs = [output[0] for output in outputs]
    return finish(outputs, *xs, *parameters(modules))
