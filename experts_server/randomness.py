"""Random numbers of an expert: its own stream, so that threads do not share one, and a forward can be repeated.

torch has one CPU generator for the whole process. Experts run on several threads, and a forward that is computed
again for its backward has to see the same dropout mask. So an expert that may draw random numbers draws them from
a generator of its own (`moe_autograd._random` hands it to the operators). A forward that may have a backward takes a
seed from it and draws from that seed, which goes to the client with the result: so it can be computed again from its
inputs wherever it has been lost. An expert made only of layers known to draw nothing pays nothing for this.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from experts_server.modules import IdentityExpert
from moe_autograd._random import CallSeeds, own_streams
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert

DRAWS_NOTHING = frozenset(
    [
        nn.Linear,
        nn.Bilinear,
        nn.Identity,
        nn.Sequential,
        nn.ModuleList,
        nn.ModuleDict,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.GELU,
        nn.ReLU,
        nn.SiLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.Softmax,
        nn.ELU,
        nn.LeakyReLU,
        nn.Flatten,
        nn.Embedding,
        IdentityExpert,
        FeedForwardExpert,
        SwiGLUExpert,
    ]
)


class RandomStream:
    """The random numbers of one expert.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self, module: nn.Module) -> None:
        may_draw = any(type(part) not in DRAWS_NOTHING for part in module.modules())
        self._seeds = CallSeeds() if may_draw else None
        if self._seeds is not None:  # seeded now: not by which expert happens to draw first
            self._seeds.draw(0, torch.device("cpu"))
        self._latest = self._seeds
        self.is_silent = self._seeds is None

    def drawing(self, seed: int = 0) -> contextlib.AbstractContextManager[None]:
        """Let random operators of this thread draw from this stream; with a seed, what always follows that."""
        if self._seeds is None:
            return contextlib.nullcontext()
        self._latest = CallSeeds(seed) if seed else self._seeds
        return own_streams(self._latest)

    @property
    def has_drawn(self) -> bool:
        """Whether the latest call drew, of one with a seed."""
        return self._latest is not None and not self._latest.is_untouched

    def state(self) -> Tensor | None:
        """Return where the stream is, or `None` if nothing is drawn from it."""
        if self._seeds is None:
            return None
        return self._seeds.generator(0, torch.device("cpu")).get_state()

    def has_moved_from(self, state: Tensor | None) -> bool:
        """Whether anything was drawn since the stream was at `state`."""
        now = self.state()
        return state is not None and now is not None and not torch.equal(state, now)

    def set_state(self, state: Tensor | None) -> None:
        """Go on from `state`, if there is one."""
        if self._seeds is not None and state is not None:
            self._seeds.generator(0, torch.device("cpu")).set_state(state)

    def next_seed(self) -> int:
        """Return a seed for `drawing`; 0 if nothing is drawn."""
        if self._seeds is None:
            return 0
        generator = self._seeds.generator(0, torch.device("cpu"))
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(1, None, generator=generator))
