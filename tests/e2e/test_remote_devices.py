"""Results of experts on servers are where the inputs are, and a default device changes nothing."""

from __future__ import annotations

import pytest
import torch

from experts_server import ExpertsServer
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.hosting import make_modules, sgd
from tests.support.subprocesses import assert_prints


def test_outputs_and_gradients_are_on_the_device_of_their_inputs() -> None:
    assert_prints(
        """
        import torch
        from torch import nn
        from experts_server import ExpertsServer
        from moe_autograd import parallel_apply
        from moe_autograd.remote import connect
        from tests.support import toy_device

        class TwoInputs(nn.Module):
            def forward(self, x, y):
                return x * y.sum(), y + 1

        with ExpertsServer({"two": TwoInputs(), "one": nn.Linear(4, 4)}) as server, connect(server.address) as experts:
            x, y = (torch.randn(3, 4).to(device).requires_grad_() for device in ("toy", "cpu"))
            first, second = experts["two"](x, y)
            print(first.device, second.device)
            (first.sum() + second.sum()).backward()
            print(x.grad.device, y.grad.device)
            torch.testing.assert_close(x.grad.cpu(), y.detach().sum().expand(3, 4))
            first, second = experts["two"](y, x)
            print(first.device, second.device)
            print(*(grad.device for grad in torch.autograd.grad(second.sum().cpu() + first.sum(), [y, x])))
            one, other = parallel_apply([experts["one"]] * 2, [(x,), (y,)])
            print(one.device, other.device)
            grads = torch.autograd.grad(one.sum().cpu() + other.sum(), [x, y])
            print(*(grad.device for grad in grads))
            with torch.no_grad():
                print(experts["one"](x).device)
        """,
        "toy:0 toy:0 toy:0 cpu cpu cpu cpu toy:0 toy:0 cpu toy:0 cpu toy:0",
    )


def test_what_the_callers_streams_compute_is_waited_for_before_threads_may_send_it() -> None:
    assert_prints(
        """
        import torch
        from torch import nn
        from experts_server import ExpertsServer
        from moe_autograd import _streams
        from moe_autograd.remote import connect
        from tests.support import toy_device
        from tests.support.streams import RecordingAccelerator, Stream

        accelerator = _streams._built_for = RecordingAccelerator(2)
        accelerator.kind = "toy"
        Stream.synchronize = lambda self: print("waits for", self.name)

        with ExpertsServer({"one": nn.Linear(4, 4)}) as server, connect(server.address) as experts:
            x = torch.randn(3, 4).to("toy").requires_grad_()
            accelerator.set_stream(accelerator.lane(0, 7))
            y = experts["one"](x)
            print("forward")
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(y, x, torch.ones(3, 4).to("toy"))
            print("backward")
            experts.load_state_dict({key: value.to("toy") for key, value in experts.state_dict().items()})
            print("weights")
            experts["one"](torch.randn(3, 4))
        """,
        "waits for lane 7 of 0 forward waits for lane 7 of 0 backward waits for lane 7 of 0 weights",
    )


@pytest.mark.parametrize("compression", ["none", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [3, 300_000])  # large ones come in several messages
def test_a_default_device_is_not_where_results_arrive(rows: int, compression: str) -> None:
    with ExpertsServer(make_modules(0), optimizer=sgd) as server:
        x = torch.randn(rows, 4, requires_grad=True)
        with torch.device("meta"), connect(server.address, compression=compression) as experts:
            y = experts["ffn.0"](x)
            y.sum().backward()
            experts.load_state_dict(experts.state_dict())
            RemoteOptimizer(experts).step()
        assert x.grad is not None
        assert (y.device, x.grad.device) == (torch.device("cpu"), torch.device("cpu"))
