"""Training with servers, and what it is compared with, for the tests in `tests/device`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.hosting.hosted import HostedExpert
from moe_autograd import FeedForwardExpert
from moe_autograd.remote import RemoteExperts, connect
from tests.support.devices import DEVICE, HAS_GPU
from tests.support.hosting import sgd
from tests.support.servers import tokens

D, ROWS = 8, 6
# A CPU's matrix products round by where their factors are in memory, and what comes in a message is anywhere.
ALIKE: Any = {"rtol": 0.0, "atol": 0.0} if HAS_GPU else {"rtol": 1e-4, "atol": 1e-5}
UP_TO_ROUNDING: Any = {"rtol": 1e-4, "atol": 1e-4}
adam = partial(torch.optim.Adam, lr=0.01)


def steps(call: Any, optimizer: Any, *, seeds: Iterable[int] = range(4), make: Any = None) -> list[Tensor]:
    """Train what is called, remote or here; return its outputs and the gradients of its inputs."""
    found: list[Tensor] = []
    for seed in seeds:
        x = tokens(ROWS, D, seed=seed) if make is None else make(seed)
        x.requires_grad_(x.is_floating_point())
        optimizer.zero_grad()
        y = call(x)
        y.float().square().sum().backward()
        optimizer.step()
        found += [y.detach(), *([] if x.grad is None else [x.grad])]
    return found


def here(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what calls a module on the device as a server does; it may change its input."""
    return lambda x: module(x.to(DEVICE).clone()).cpu()


def randoms(dtype: torch.dtype, *shape: int) -> Callable[[int], Tensor]:
    return lambda seed: tokens(*shape, seed=seed).to(dtype)


def hosted(server: ExpertsServer) -> HostedExpert:
    assert server._server is not None
    return server._server.registry["e"].hosted


@contextlib.contextmanager
def served(modules: dict[str, nn.Module], num_servers: int = 1, **options: Any) -> Iterator[RemoteExperts]:
    """Host modules, on several servers each its share, and connect to all."""
    names = list(modules)
    with contextlib.ExitStack() as stack:
        shares = [{name: modules[name] for name in names[n::num_servers]} for n in range(num_servers)]
        servers = [stack.enter_context(ExpertsServer(share, optimizer=sgd)) for share in shares]
        addresses = [server.address for server in servers]
        yield stack.enter_context(connect(addresses, **{"timeout_s": 20, **options}))


def ffns(num: int = 4, width: int = 16) -> dict[str, nn.Module]:
    torch.manual_seed(2)
    return {f"ffn.{n}": FeedForwardExpert(width) for n in range(num)}
