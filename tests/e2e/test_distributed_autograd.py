"""`torch.distributed.autograd` differentiates by an engine of its own, which does not tell which nodes it runs.

Ours would leave out all that they lead to. So they refuse it; what torch's own engine does meanwhile is as ever.
"""

from __future__ import annotations

import pytest

from tests.support.limits_page import of
from tests.support.subprocesses import assert_prints

# One process is enough, whose graph has no RPC. Torch warns of its own use of process groups.
PROGRAM = """
    import contextlib, tempfile, warnings
    import torch, torch.distributed.autograd as dist_autograd, torch.distributed.rpc as rpc
    from torch import nn

    def refusal_of(backward):
        try:
            backward()
        except RuntimeError as error:  # the engine's own, of what was raised
            return str(error)

    open_until_the_end = contextlib.ExitStack()
    {made}
    with open_until_the_end, warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{{folder}}/store")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        with dist_autograd.context() as context:
            y, leaves = outputs()
            told = refusal_of(lambda: dist_autograd.backward(context, [y.sum()], retain_graph=True))
            assert "{who}, backward: expected torch's own engine, got one that does not tell" in told, told
            assert not dist_autograd.get_gradients(context)
            y.backward(torch.ones_like(y), retain_graph=True)  # begins with the node itself
            first = gradients(leaves)
            y.sum().backward()
            assert all(torch.equal(both, 2 * one) for both, one in zip(gradients(leaves), first, strict=True))
            assert all(grad.any() for grad in first)
        rpc.shutdown()
"""

MAPS = """
    from moe_autograd import map_with_parallel_backward, parallel_apply
    from moe_autograd.autograd import in_turn
    in_turn.MOST_SMALL = -1

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 3 * x

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    def gradients(leaves):
        return [leaf.grad.clone() for leaf in leaves]
"""

MODULES = """
    def outputs():
        modules = [nn.Linear(4, 4) for _ in range(2)]
        results = parallel_apply(modules, [torch.ones(2, 4)] * 2)
        return results[1], [*modules[1].parameters()]
"""

FUNCTIONS = """
    def outputs():
        x = torch.ones(3, requires_grad=True)
        return map_with_parallel_backward(Triple, (x,), (x + 1,))[1], [x]
"""

APART = """
    def outputs():
        x = torch.ones(3, requires_grad=True)
        return map_with_parallel_backward(Triple, (Triple.apply(x),), (Triple.apply(x),))[1], [x]
"""


@of("`torch.distributed.autograd.backward`**, that of RPC, does not tell which nodes it runs")
@pytest.mark.parametrize("outputs", [MODULES, FUNCTIONS, APART], ids=["modules", "functions", "apart"])
def test_a_map_refuses_that_engine_and_not_torchs_own(outputs: str) -> None:
    assert_prints(PROGRAM.format(made=MAPS + outputs, who="parallel map"), "")


@of("through a map's calls, and through experts that are offloaded or on servers, it raises")
def test_an_offloaded_expert_refuses_that_engine_and_not_torchs_own() -> None:
    made = """
    from moe_autograd.autograd.offload import OffloadedExperts
    from tests.support.offloading import OPTIMIZERS
    experts = OffloadedExperts([nn.Linear(4, 4)], OPTIMIZERS["sgd"], max_resident_bytes=1000)
    open_until_the_end.enter_context(experts)

    def outputs():
        return experts[0](torch.ones(2, 4)), []

    def gradients(leaves):
        return [grad.clone() for grad in experts.gradients(0).values()]
    """
    assert_prints(PROGRAM.format(made=made, who="OffloadedExperts"), "")


def test_an_expert_on_a_server_refuses_that_engine_and_not_torchs_own() -> None:
    made = """
    from experts_server import ExpertsServer
    from moe_autograd.remote import connect
    server = open_until_the_end.enter_context(ExpertsServer({"linear": nn.Linear(4, 4)}))
    experts = open_until_the_end.enter_context(connect(server.address))

    def outputs():
        x = torch.ones(2, 4, requires_grad=True)
        return experts["linear"](x), [x]

    def gradients(leaves):
        return [leaf.grad.clone() for leaf in leaves]
    """
    assert_prints(PROGRAM.format(made=made, who="remote expert"), "")
