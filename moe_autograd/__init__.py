"""Forward and backward passes of many experts at once, local or remote, with exactly PyTorch's numbers."""

from moe_autograd.autograd.emulated import (
    EmulatedAutogradContext,
    run_isolated_backward,
    run_isolated_forward,
)
from moe_autograd.autograd.parallel import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.split_backward import split_backward
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.moe.routing import Routing

__all__ = [
    "EmulatedAutogradContext",
    "FeedForwardExpert",
    "MixtureOfExperts",
    "Routing",
    "SwiGLUExpert",
    "TopKRouter",
    "map_with_parallel_backward",
    "parallel_apply",
    "run_isolated_backward",
    "run_isolated_forward",
    "split_backward",
]
