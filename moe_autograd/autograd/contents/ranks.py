"""Calls that talk with other ranks of a distributed program: they take turns.

Collectives of one group meet in the order in which each rank comes to them. Calls side by side come to theirs in any
order, another one on each rank: at best sizes differ and all is over, at worst they agree and sums are of the wrong
numbers. So a map with a call that is known to talk makes its calls one after the other, forwards and backwards, in the
order of their index. Known are

1. weights and inputs that are `DTensor`s (tensor parallelism; `FakeTensor`s and the weights of `per_sample`, which talk
   with nobody, cannot have several threads either);
2. modules that `DistributedDataParallel` or `FullyShardedDataParallel` has wrapped, and `SyncBatchNorm`;
3. modules with a hook of `torch.distributed` on their forward (`replicate`, `PrepareModuleInput`);
4. callables that name a collective, as far as `named` sees it (its rule 3).

Whoever calls collectives by other means has to say so, by `max_concurrency=1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from moe_autograd._imported import imported
from moe_autograd.autograd.contents.per_sample import are_per_sample

_DTENSORS, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"
_USUAL = {torch.Tensor, nn.Parameter, type(None)}
_REPLICATE = "torch.distributed._composable.replicate"


def has_other_ranks() -> bool:
    """Whether there is anybody to talk with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def are_for_one_call(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a tensor with parts on other ranks; or one that serves one thread (rule 1)."""
    kinds = {*map(type, values)} - _USUAL
    if not kinds:  # mostly
        return False
    of_ranks = imported(_DTENSORS, "DTensor", FakeTensor)
    return any(issubclass(kind, (FakeTensor, of_ranks)) for kind in kinds) or are_per_sample(kinds)


def modules_that_talk() -> tuple[type, ...]:
    """Return the classes of modules that run collectives, as far as somebody has imported them."""
    always = nn.SyncBatchNorm, DistributedDataParallel
    return *always, *filter(None, [imported(_FSDP, "FullyShardedDataParallel")])


def has_hooks_of_torch(attributes: dict[str, Any]) -> bool:
    """Whether a module, which has these attributes, has a hook on its forward that is of `torch.distributed`."""
    before, after = attributes.get("_forward_pre_hooks"), attributes.get("_forward_hooks")
    if not before and not after:  # mostly
        return False
    hooks = (*(before or {}).values(), *(after or {}).values())
    return any(str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks)


def refuse_reducing(module: nn.Module) -> None:
    """Raise for a wrapper that reduces gradients when the call's backward ends, before they are added to `.grad`.

    One that has none to reduce, as a frozen teacher, may stay.
    """
    if not torch.is_grad_enabled():
        return
    is_root = isinstance(module, modules_that_talk()[2:]) and vars(module)["_is_root"] is not False
    is_static = _has_static_graph(module)
    for is_meant, what in (
        (hasattr(type(module), "set_reshard_after_backward"), "`fully_shard` has wrapped"),
        (is_root, "`FullyShardedDataParallel` has wrapped with nothing around them that it has wrapped, too"),
        (is_static, "`DistributedDataParallel` or `replicate` has wrapped with static_graph=True"),
    ):
        if is_meant and any(parameter.requires_grad for parameter in module.parameters()):
            raise TypeError(
                f"parallel_apply: expected calls without modules that {what}, got {type(module).__name__}, whose "
                "gradients would be a step late. Wrap what makes the map, not its calls; what is not trained, freeze."
            )


def _has_static_graph(module: nn.Module) -> bool:
    if isinstance(module, DistributedDataParallel):
        return module.static_graph
    replicate = imported(_REPLICATE, "replicate")
    if replicate is None or not (state := replicate.state(module)):
        return False
    return bool(state._ddp.static_graph if state.has_initialized else state._init_kwargs.get("static_graph"))
