"""`MixtureOfExperts`: route, dispatch, call all experts at once, combine.

This file only composes. Deciding is the router's (`routers`), moving tokens is `dispatch`'s, running the
calls concurrently forwards and backwards is `parallel_apply`'s, and computing is the experts' own, here or
on a server.

Shape letters: T tokens, D d_model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.moe.dispatch import combine, dispatch, plan_dispatch
from moe_autograd.moe.idle import with_zero_grads
from moe_autograd.moe.routing import Routing

Experts = Iterable[nn.Module] | Mapping[str, nn.Module] | nn.ModuleDict


class MixtureOfExperts(nn.Module):
    """Send each token to the experts that `router` chooses and add up what they return, weighted.

    Means the plain loop ``for i, expert in enumerate(experts): y[tokens_i] += weight_i *
    expert(x[tokens_i])``, with its values and gradients, but all experts run at the same time, in the
    forward and in the backward.

    Args:
        router: a `TopKRouter`, or any module with `num_experts` that maps `x`, (..., D), to a `Routing` of
            its tokens.
        experts: one module for each index of the router, mapping (num_tokens, D) to the same shape: a
            sequence, an `nn.ModuleList`, or a mapping whose values are taken in its order, such as the
            remote experts that `moe_autograd.remote.connect` returns. They become submodules
            (``layer.experts``), so `parameters()`, `state_dict()` and `to()` cover the local ones.
        max_concurrency: how many experts run at once at most; `None` lets the library choose.
        recompute: keep only each expert's input and run its forward again in the backward, to save memory.
        zero_grads_for_idle_experts: an expert without tokens is not called and its parameters get no
            gradient. `True` gives them zeros, which `DistributedDataParallel` wants.

    Raises:
        ValueError: the experts are not as many as the router chooses from, `x` has another width than the
            router, or an expert changes the shape of what it is given.
        TypeError: an expert is not a module, or returns something that is not a tensor.

    Autograd: gradients flow to `x`, the router and the local experts, to any order that the experts
    support. An expert may change its input in place: nobody else holds that memory.

    Threads: may be called from several; it keeps nothing of a call. Experts run on worker threads that see
    the caller's grad mode, autocast and the rest of its world.

    >>> import torch
    >>> from moe_autograd.moe.experts import FeedForwardExpert
    >>> from moe_autograd.moe.routers import TopKRouter
    >>> experts = [FeedForwardExpert(16) for _ in range(4)]
    >>> layer = MixtureOfExperts(TopKRouter(16, num_experts=4, top_k=2), experts)
    >>> y, routing = layer(torch.randn(2, 5, 16), return_routing=True)
    >>> y.shape, routing.tokens_per_expert.sum().item()
    (torch.Size([2, 5, 16]), 20)
    """

    def __init__(
        self,
        router: nn.Module,
        experts: Experts,
        *,
        max_concurrency: int | None = None,
        recompute: bool = False,
        zero_grads_for_idle_experts: bool = False,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = _as_module_list(experts)
        self.max_concurrency = max_concurrency
        self.recompute = recompute
        self.zero_grads_for_idle_experts = zero_grads_for_idle_experts
        if len(self.experts) != router.num_experts:
            raise ValueError(
                f"MixtureOfExperts: expected as many experts as the router chooses from, {router.num_experts}, got "
                f"{len(self.experts)} (num_experts={router.num_experts}). Pass num_experts={len(self.experts)} to the "
                "router, or other experts here."
            )

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Compute the layer.

        Args:
            x: (..., d_model), floating; any number of tokens, also none.
            return_routing: also return the router's decision, for its losses and loads.

        Returns:
            A tensor of the shape and dtype of `x`; with `return_routing`, a tuple of it and the `Routing`.
        """
        routing: Routing = self.router(x)
        x_TD = x.reshape(routing.num_tokens, x.shape[-1])
        plan = plan_dispatch(routing.expert_index, routing.tokens_per_expert)
        slices = dispatch(x_TD, plan)
        outputs = self._call_experts(plan.active, slices)
        y_TD = combine(outputs or [x_TD], routing.combine_weights, plan).to(x.dtype)
        if self.zero_grads_for_idle_experts:
            y_TD = with_zero_grads(y_TD, self._idle_parameters(plan.active))
        y = y_TD.reshape(x.shape)
        return (y, routing) if return_routing else y

    def extra_repr(self) -> str:
        """Show the options that differ from their defaults in the module's `repr`."""
        defaults = {"max_concurrency": None, "recompute": False, "zero_grads_for_idle_experts": False}
        return ", ".join(
            f"{name}={value}" for name, d in defaults.items() if (value := getattr(self, name)) != d
        )

    def _call_experts(self, active: Sequence[int], slices: Sequence[Tensor]) -> list[Tensor]:
        experts = list(self.experts)
        outputs = parallel_apply(
            [experts[index] for index in active],
            [(tokens,) for tokens in slices],
            max_concurrency=self.max_concurrency,
            recompute=self.recompute,
            names=[f"expert {index}" for index in active],
        )
        for index, tokens, output in zip(active, slices, outputs, strict=True):
            _check_output(index, tokens, output)
        return list(outputs)

    def _idle_parameters(self, active: Sequence[int]) -> list[Tensor]:
        called = {parameter for index in active for parameter in self.experts[index].parameters()}
        return [parameter for parameter in self.experts.parameters() if parameter not in called]


def _as_module_list(experts: Experts) -> nn.ModuleList:
    if isinstance(experts, nn.ModuleList):
        return experts
    modules = list(experts.values() if isinstance(experts, Mapping | nn.ModuleDict) else experts)
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"MixtureOfExperts: expected every expert to be an nn.Module, got {type(module).__name__} "
                f"(expert_index={index}). Wrap a function in a module."
            )
    return nn.ModuleList(modules)


def _check_output(expert_index: int, tokens: Tensor, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"MixtureOfExperts: expected a tensor from an expert, got {type(output).__name__} "
            f"(expert_index={expert_index}). Return the outputs alone."
        )
    if output.shape != tokens.shape:
        raise ValueError(
            f"MixtureOfExperts: expected an expert to keep the shape {tuple(tokens.shape)} of its tokens, got "
            f"{tuple(output.shape)} (expert_index={expert_index}). Let it map d_model to d_model, row by row."
        )
