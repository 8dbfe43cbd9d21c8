"""Random numbers of an expert: from the seed that came with a call, else from a stream of the expert's own.

torch has one CPU generator for the whole process. Experts run on several threads, and a forward that is computed
again, for its backward or by another server, has to see the same dropout mask. So a client sends a seed with each
forward, and an expert that may draw random numbers draws them from generators of that seed (`moe_autograd._random`
hands them to the operators). Where none came, forwards that may have a backward take one from the expert's own stream,
and all else draws from that. It begins where the expert's name and the process's seed tell, and takes nothing from the
process's generator, which belongs to whoever has made a server in his own process. An expert made only of layers known
to draw nothing, as long as it has no hooks, pays next to nothing for this.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from experts_server.hosting.separating import ROW_WISE, LateHooks, is_its_class
from moe_autograd._contexts import contextmanager
from moe_autograd._random import GivenSeeds, own_streams, running

DRAWS_NOTHING = ROW_WISE | frozenset(
    [
        *(nn.Bilinear, nn.Embedding, nn.Flatten, nn.LayerNorm, nn.RMSNorm, nn.Softmax),
        *(nn.ModuleDict, nn.ModuleList),
    ]
)

CPU = torch.device("cpu")

FORWARD, BACKWARD, LATER = range(3)  # parts of a call: with one seed, each draws other numbers


class RandomStream:
    """The random numbers of one expert.

    Args:
        name: the expert's.
        module: that may draw.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._draws_nothing = all(
            type(part) in DRAWS_NOTHING and is_its_class(part) for part in module.modules()
        )
        self._late_hooks = LateHooks(module)
        self._seeds = _seeds_of(name)
        found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        self._devices = [CPU, *sorted(found - {CPU}, key=str)]
        self._latest: GivenSeeds | None = None

    @property
    def is_silent(self) -> bool:
        """Whether its module is known to draw nothing."""
        return self._draws_nothing and not self._late_hooks

    @contextmanager
    def drawing(self, seed: int = 0, part: int = FORWARD) -> Iterator[None]:
        """Let random operators of this thread draw from this stream; with a seed, what always follows that."""
        if self.is_silent:
            yield
            return
        self._latest = GivenSeeds(seed) if seed else None
        with own_streams(self._latest or self._seeds):
            running.index = part if seed else 0
            yield

    @property
    def has_drawn(self) -> bool:
        """Whether the latest call had a seed, and drew."""
        return self._latest is not None and self._latest.has_drawn and not self.is_silent

    def state(self) -> Tensor | None:
        """Return where the stream is, on the CPU and on the module's devices; `None` if nothing is drawn from it."""
        if self.is_silent:
            return None
        states = [generator.get_state() for generator in self._generators()]
        return states[0] if len(states) == 1 else torch.cat(states)

    def has_moved_from(self, state: Tensor | None) -> bool:
        """Whether anything was drawn since the stream was at `state`."""
        now = self.state()
        return state is not None and now is not None and not torch.equal(state, now)

    def set_state(self, state: Tensor | None) -> None:
        """Go on from `state`, if there is one; on the devices whose part is there."""
        if state is None or self.is_silent:
            return
        for generator in self._generators():
            own, state = state.tensor_split([len(generator.get_state())])
            if len(own):  # a checkpoint may be of other devices
                generator.set_state(own.clone())  # torch reads from where the memory of a view begins

    def next_seed(self) -> int:
        """Return a seed for `drawing`; 0 if nothing is drawn."""
        if self.is_silent:
            return 0
        drawn = torch.empty((), dtype=torch.int64, device="cpu")
        return int(drawn.random_(1, None, generator=self._seeds.generator(0, CPU)))

    def _generators(self) -> list[torch.Generator]:
        return [self._seeds.generator(0, device) for device in self._devices]


def _seeds_of(name: str) -> GivenSeeds:
    of_process = GivenSeeds(torch.initial_seed())
    return GivenSeeds(of_process.seed_of(1 + zlib.crc32(name.encode())))
