"""Programs whose calls take objects that are no pytrees, and hold tensors with history.

Registered with those of `module_programs`.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.comparison import MapFunction
from tests.support.module_programs import NUM_CALLS, finish, leaves, parameters, program, seeded


@program
def inputs_in_an_object_of_ones_own(apply: MapFunction) -> Any:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    middles = [x.exp() for x in xs]
    calls = [lambda box, m=m: m(box.hidden) for m in modules]
    outputs = apply(calls, [(types.SimpleNamespace(hidden=m),) for m in middles])
    return finish([*outputs, *middles], *xs, *parameters(modules))


@program
def objects_among_the_inputs_that_serve_outside_as_well(apply: MapFunction) -> Any:
    """Of one that all calls take a hook sees the whole gradient."""
    (weight,), modules, xs, log = leaves(1, 4), seeded(lambda: nn.Linear(4, 4)), leaves(), []
    shared = types.SimpleNamespace(scale=weight.exp())
    shared.scale.register_hook(lambda grad: log.append(grad.clone()))
    normals = [torch.distributions.Normal(x.tanh(), x.exp()) for x in xs]
    calls = [lambda of, *, by, m=m: m(of["normal"].log_prob(torch.ones(4))) * by[0].scale for m in modules]
    outputs = apply(calls, [({"normal": normal},) for normal in normals], [{"by": [shared]}] * NUM_CALLS)
    entropies = [normal.entropy() * shared.scale for normal in normals]
    return finish([*outputs, *entropies], weight, *xs, *parameters(modules)), log


@program
def caches_among_the_inputs_that_calls_write_to(apply: MapFunction) -> Any:
    """In place, step by step; what was written before has a history, which nobody asks for."""
    modules, xs, said = seeded(lambda: nn.Linear(4, 4)), leaves(), []
    caches = [types.SimpleNamespace(rows=torch.zeros(3, 3, 4, dtype=torch.float64)) for _ in modules]

    def step(module: nn.Module, x: Tensor, cache: Any, i: int) -> Any:
        cache.rows[i] = module(x)
        return cache.rows.sum(0)

    for i in range(3):
        inputs = [(*both, cache, i) for *both, cache in zip(modules, xs, caches, strict=True)]
        said.append([y.detach() for y in apply([step] * NUM_CALLS, inputs)])
    return said


@program
def a_dictionary_with_attributes_among_the_inputs(apply: MapFunction) -> Any:
    """What they hold serves outside as well."""

    class Batch(dict[str, Any]):
        pass

    (weight,), modules, xs = leaves(1, 4), seeded(lambda: nn.Linear(4, 4)), leaves()
    batches = [Batch(x=x.exp()) for x in xs]
    for batch in batches:
        batch.scale = weight.exp()  # type: ignore[attr-defined]
    calls = [lambda batch, m=m: m(batch["x"]) * batch.scale for m in modules]
    outputs = apply(calls, [(batch,) for batch in batches])
    outside = [batch["x"] * batch.scale for batch in batches]  # type: ignore[attr-defined]
    return finish([*outputs, *outside], weight, *xs, *parameters(modules))


@program
def parts_that_lead_back_to_what_they_are_parts_of(apply: MapFunction) -> Any:
    """One of the modules cannot be called in turn."""
    xs = leaves()
    modules = [
        *seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), NUM_CALLS - 1),
        *seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Softsign()), 1),
    ]
    for module in modules:
        module.get_submodule("1").parent = module
    return finish(apply(modules, [(x,) for x in xs]), *xs, *parameters(modules))
