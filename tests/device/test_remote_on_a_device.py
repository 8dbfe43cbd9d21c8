"""Remote experts called from a GPU: the layer is where its inputs are, its experts somewhere else.

They need a CUDA device.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter
from moe_autograd.remote import connect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_EXPERTS, WIDTH = 4, 16


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("is_default", [False, True])
def test_a_layer_on_a_gpu_with_experts_on_a_server(is_default: bool, on_failure: str) -> None:
    hosted: dict[str, nn.Module] = {f"ffn.{i}": FeedForwardExpert(WIDTH) for i in range(NUM_EXPERTS)}
    router = TopKRouter(WIDTH, NUM_EXPERTS, top_k=2).cuda()
    local = MixtureOfExperts(router, copy.deepcopy(list(hosted.values()))).cuda()
    with (
        ExpertsServer(hosted) as server,
        torch.device("cuda" if is_default else "cpu"),
        connect(server.address) as experts,
    ):
        remote = MixtureOfExperts(router, experts, on_failure=on_failure)  # type: ignore[arg-type]
        x, ours, theirs = torch.randn(50, WIDTH).cuda(), [], []
        for layer, found in ((remote, theirs), (local, ours)):
            own = x.clone().requires_grad_()
            y = layer(own)
            found += [y, *torch.autograd.grad(y.square().sum(), [own, router.weight])]
    torch.testing.assert_close(theirs, ours)
