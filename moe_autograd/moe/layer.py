"""`MixtureOfExperts`: route, dispatch, call all experts at once, combine.

This file only composes. Deciding is the router's (`routers`), moving tokens is `dispatch`'s, running the
calls concurrently forwards and backwards is `parallel_apply`'s, and computing is the experts' own, here or
on a server.

Shape letters: T tokens, D d_model.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe_autograd._ambient import is_recorded, refuse_transforms
from moe_autograd.autograd.parallel import check_max_concurrency, is_observed, parallel_apply
from moe_autograd.autograd.recompute import Recompute, as_recompute
from moe_autograd.autograd.uncompiled import uncompiled
from moe_autograd.errors import UnsupportedTransformError
from moe_autograd.moe.dispatch import DispatchPlan, combine, dispatch, plan_dispatch, select
from moe_autograd.moe.experts import check_output
from moe_autograd.moe.failures import Rests, Tolerance
from moe_autograd.moe.idle import with_zero_grads
from moe_autograd.moe.in_turn import compute_in_turn, way_without_gradients
from moe_autograd.moe.partial import PartialPass
from moe_autograd.moe.routing import Routing, checked_loads

_LONGEST_S = 1e8  # as for `connect(timeout_s=...)`; a clock of `threading` goes up to 9e9

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
        recompute: keep only each expert's input and run its forward again in the backward, to save memory;
            a `Recompute` says how. Experts on servers keep only inputs here anyway.
        defer_weight_grads: in a backward, go on upstream as soon as the gradients of the experts' inputs are there;
            see `parallel_apply`. Not with "drop".
        on_failure: what to do if an expert cannot be reached or fails on its server. "raise" raises its error.
            "drop" goes on without it: weights are renormalised over the token's experts that answered; an expert
            that is lost between forward and backward leaves out its part of the gradient. `routing.failures` says
            who was lost, when and why. A server that is gone is waited for only while a token has too few experts
            without it, and may not become zeros. An expert that failed is left alone for a while that grows, where
            others can stand in for it. An error of a module that runs here is raised all the same, unless it is a
            `RemoteError`, `ConnectionError` or `TimeoutError`; so is a call that is refused as invalid or not
            permitted.
        min_experts: with "drop", how many of its experts have to answer for each token, 1 to `top_k`.
        allow_zero_outputs: with "drop", a token with fewer becomes zeros instead of raising.
        timeout_after_min_s: with "drop", as soon as every token has `min_experts`, wait for the others at most so
            long. They count as failures; on their server they are not begun, or let run to their end. `None`
            waits for all.
        zero_grads_for_idle_experts: an expert without tokens is not called and its parameters get no
            gradient. `True` gives them zeros, which `DistributedDataParallel` and `fully_shard` want; not those of
            offloaded and remote experts, which are not among the layer's.

    Raises:
        ValueError: the experts are not as many as the router chooses from, `x` has another width than the
            router, or an expert changes the shape of what it is given. Options that do not fit together. A router of
            yours returns a `Routing` of other tokens or experts than there are.
        TypeError: an expert is not a module, or returns something that is not a tensor, or complex numbers for real
            tokens; a router no `Routing`; `x` is no tensor, or has whole numbers.
        TooFewExpertsError: with "drop", some token has fewer than `min_experts`.
        UnsupportedTransformError: inside a `torch.func` transform or a trace, or with forward-mode tangents.

    Autograd: gradients flow to `x`, the router and the local experts, to any order that the experts
    support. An expert may change its input in place: nobody else holds that memory. Not with `recompute`, which
    takes that input again, nor an offloaded one: these raise.

    Threads: may be called from several; of a call it keeps only which experts are to be left alone. Experts run
    on worker threads that see the caller's grad mode, autocast and the rest of its world.

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
        recompute: bool | Recompute = False,
        defer_weight_grads: bool = False,
        zero_grads_for_idle_experts: bool = False,
        on_failure: Literal["raise", "drop"] = "raise",
        min_experts: int = 1,
        allow_zero_outputs: bool = False,
        timeout_after_min_s: float | None = None,
    ) -> None:
        super().__init__()
        num_experts = _num_experts_of(router)
        check_max_concurrency("MixtureOfExperts", max_concurrency)
        as_recompute(recompute)  # refuses what is none
        self.router = router
        self.experts = _as_module_list(experts)
        self.max_concurrency = max_concurrency
        self.recompute = recompute
        self.defer_weight_grads = defer_weight_grads
        self.zero_grads_for_idle_experts = zero_grads_for_idle_experts
        self.on_failure = on_failure
        self.tolerance = Tolerance(min_experts, allow_zero_outputs, timeout_after_min_s)
        self._rests = Rests()
        _check_tolerance(on_failure, self.tolerance)
        if defer_weight_grads and on_failure == "drop":
            raise ValueError(
                "MixtureOfExperts: expected defer_weight_grads=False with on_failure='drop', got True: gradients that "
                "come later are not left out. Choose one of them."
            )
        _check_min_experts(min_experts, getattr(router, "top_k", min_experts))
        if len(self.experts) != num_experts:
            raise ValueError(
                f"MixtureOfExperts: expected as many experts as the router chooses from, {num_experts}, got "
                f"{len(self.experts)} (num_experts={num_experts}). Pass num_experts={len(self.experts)} to the "
                "router, or other experts here."
            )

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Compute the layer.

        Args:
            x: (..., d_model), floating; any number of tokens, also none.
            return_routing: also return the router's decision, for its losses and loads.

        Returns:
            A tensor of the shape and dtype of `x`; with `return_routing`, a tuple of it and the `Routing`.

        Raises:
            TypeError: `x` is no tensor, but a list, for one, or has whole numbers.
            UnsupportedTransformError: inside `torch.func`, `torch.jit.trace`, forward-mode AD, `torch.export`,
                `make_fx` or `symbolic_trace`.
        """
        if torch.compiler.is_exporting():
            raise UnsupportedTransformError(
                "MixtureOfExperts: expected to be run, got torch.export around it. How many tokens an expert has is "
                "known only then. Export router and experts each for itself."
            )
        if not isinstance(x, Tensor):
            raise _no_tensor(x)
        y, routing = self._through_experts(x, self.router(x))
        return (y, routing) if return_routing else y

    @uncompiled  # how many experts have tokens, and how many, differs: each combination would be compiled anew
    def _through_experts(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        refuse_transforms([x])  # dispatch would fail first, in words of its own
        if is_recorded():
            raise _recorded()
        x_TD = x.reshape(-1, x.shape[-1])
        tokens_per_expert = checked_loads(routing, len(x_TD), len(self.experts))
        plan = plan_dispatch(routing.expert_index, tokens_per_expert)
        if routing.is_kept is not None:
            plan, _ = select(plan, routing.is_kept)
        active: Sequence[int] = plan.active
        if self.on_failure == "raise":
            y_TD = self._compute(x_TD, routing.combine_weights, plan)
        else:
            routing = dataclasses.replace(routing, failures=[])
            y_TD, active = self._call_tolerantly(x_TD, routing, plan)
        y_TD = _as_dtype(y_TD, x.dtype)
        if self.zero_grads_for_idle_experts and torch.is_grad_enabled():
            y_TD = with_zero_grads(y_TD, self._idle_parameters(active))
        # No view: torch refuses to change one in place that was made under no_grad, or by a function such as FSDP's.
        return y_TD if x.dim() == 2 else torch.ops.aten._unsafe_view(y_TD, x.shape), routing

    def extra_repr(self) -> str:
        """Show the options that differ from their defaults in the module's `repr`."""
        chosen = vars(self) | dataclasses.asdict(self.tolerance)
        options = inspect.signature(MixtureOfExperts).parameters.values()
        differing = [
            one.name for one in options if one.kind is one.KEYWORD_ONLY and chosen[one.name] != one.default
        ]
        return ", ".join(f"{name}={chosen[name]!r}" for name in differing)

    def _compute(self, x_TD: Tensor, combine_weights: Tensor, plan: DispatchPlan) -> Tensor:
        experts = list(self.experts)
        experts = [experts[index] for index in plan.active]
        if not is_observed():
            way = way_without_gradients(experts, x_TD, combine_weights, plan, self.max_concurrency)
            if way is not None:
                return compute_in_turn(way, experts, x_TD, combine_weights, plan)
        # No name for the outputs here: `combine` lets go of each.
        return combine(
            self._call_experts(experts, plan.active, dispatch(x_TD, plan)) or [x_TD[:0]],
            combine_weights,
            plan,
        )

    def _call_experts(
        self, experts: Sequence[nn.Module], active: Sequence[int], slices: Sequence[Tensor]
    ) -> list[Tensor]:
        outputs = parallel_apply(
            experts,
            [(tokens,) for tokens in slices],
            max_concurrency=self.max_concurrency,
            recompute=self.recompute,
            defer_weight_grads=self.defer_weight_grads,
            names=[f"expert {index}" for index in active],
        )
        for index, tokens, output in zip(active, slices, outputs, strict=True):
            check_output(index, tokens, output)
        return list(outputs)

    def _call_tolerantly(
        self, x_TD: Tensor, routing: Routing, plan: DispatchPlan
    ) -> tuple[Tensor, Sequence[int]]:
        _check_min_experts(self.tolerance.min_experts, routing.top_k)
        one_pass = PartialPass(routing, list(self.experts), self._rests, self.tolerance)
        return one_pass.compute(x_TD, plan, max_concurrency=self.max_concurrency, recompute=self.recompute)

    def _idle_parameters(self, active: Sequence[int]) -> list[Tensor]:
        called = {parameter for index in active for parameter in self.experts[index].parameters()}
        return [parameter for parameter in self.experts.parameters() if parameter not in called]


def _as_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    if not torch.can_cast(y.dtype, dtype):
        raise TypeError(
            f"MixtureOfExperts: expected outputs times combine_weights to fit the dtype of x, {dtype}, got "
            f"{y.dtype}. Let experts and router return a dtype that x has room for, or pass x.to({y.dtype})."
        )
    return y.to(dtype)


def _check_tolerance(on_failure: str, tolerance: Tolerance) -> None:
    if on_failure not in ("raise", "drop"):
        raise ValueError(
            f'MixtureOfExperts: expected on_failure "raise" or "drop", got {on_failure!r}. "drop" goes on without '
            "experts that fail."
        )
    timeout_s = tolerance.timeout_after_min_s
    if timeout_s is not None and not 0 <= timeout_s <= _LONGEST_S:
        raise ValueError(
            "MixtureOfExperts: expected timeout_after_min_s of at least 0 seconds "
            f"(up to {_LONGEST_S:.0e}) or None, got {timeout_s}. None waits for all experts."
        )
    if on_failure == "raise" and tolerance != Tolerance():
        raise ValueError(
            f'MixtureOfExperts: expected on_failure="drop" with min_experts, allow_zero_outputs or '
            f'timeout_after_min_s, got on_failure="raise" ({tolerance}). With "raise" all experts have to answer.'
        )


def _check_min_experts(min_experts: int, top_k: int) -> None:
    if not hasattr(min_experts, "__index__") or not 1 <= min_experts <= top_k:
        raise ValueError(
            f"MixtureOfExperts: expected a whole min_experts from 1 to top_k, got {min_experts!r} (top_k={top_k}). "
            "A token has no more experts than top_k."
        )


def _num_experts_of(router: nn.Module) -> int:
    num_experts: Any = getattr(router, "num_experts", None)
    if not hasattr(num_experts, "__index__"):
        raise TypeError(
            f"MixtureOfExperts: expected a router with an int num_experts, got {type(router).__name__} "
            f"(num_experts={num_experts!r}). Pass a TopKRouter, or a module that returns a Routing and says how many "
            "experts it chooses from."
        )
    return operator.index(num_experts)


def _as_module_list(experts: Experts) -> nn.ModuleList:
    if isinstance(experts, nn.ModuleList):
        return experts
    if not isinstance(experts, Iterable):
        raise TypeError(
            f"MixtureOfExperts: expected several experts, got one {type(experts).__name__}. "
            "Pass a list, an nn.ModuleList or a mapping."
        )
    modules = list(experts.values() if isinstance(experts, Mapping | nn.ModuleDict) else experts)
    for index, module in enumerate(modules):
        if isinstance(module, str):
            raise TypeError(
                f"MixtureOfExperts: expected every expert to be an nn.Module, got the name {module!r} "
                f"(expert_index={index}). Pass the mapping itself: a list of it has its names."
            )
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"MixtureOfExperts: expected every expert to be an nn.Module, got {type(module).__name__} "
                f"(expert_index={index}). Wrap a function in a module; of a class, pass an instance."
            )
    return nn.ModuleList(modules)


def _no_tensor(x: object) -> Exception:
    if is_recorded([x]):
        return _recorded()
    return TypeError(
        f"MixtureOfExperts: expected a tensor of shape (..., d_model), got {type(x).__name__}. "
        "Pass torch.as_tensor(x)."
    )


def _recorded() -> UnsupportedTransformError:
    return UnsupportedTransformError(
        "MixtureOfExperts: expected to be run, got make_fx or symbolic_trace around it. It would record where the "
        "tokens of one input go, for all. Record router and experts each for itself."
    )
