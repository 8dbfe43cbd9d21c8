"""Forward and backward passes of many experts at once, local or remote, with exactly PyTorch's numbers.

::

    map_with_parallel_backward    an autograd function, on many sets of arguments
    parallel_apply                modules, or any callables
    MixtureOfExperts, TopKRouter  a layer that chooses experts, by a Routing; FeedForwardExpert, SwiGLUExpert
    split_backward                the gradients of the inputs first, those of the weights later
    run_isolated_forward, run_isolated_backward, EmulatedAutogradContext
                                  one call of an autograd function in two halves, for schedulers of your own

Beside these: `remote` (experts on servers), `autograd.offload` (more experts than memory), `autograd.recompute`,
`autograd.hooks` (when a backward begins and ends), `timeline` (who ran when), and `errors`.
"""

from moe_autograd.autograd.emulated import EmulatedAutogradContext
from moe_autograd.autograd.isolated import run_isolated_backward, run_isolated_forward
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
