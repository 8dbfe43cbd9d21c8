"""What no expert should do: return what cannot be sent, raise what cannot be told. It is its own calls' affair."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from experts_server import ExpertsServer
from moe_autograd import FeedForwardExpert, SwiGLUExpert
from moe_autograd.errors import ConfigError, InvalidCallError
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.servers import ServerProcess, WireClient, tokens

D = 4


class Odd(nn.Module):
    """Does what a function does; has a weight, so that it is trained."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.weight)


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


def raising(error: BaseException) -> Callable[[Tensor], NoReturn]:
    def function(_: Tensor) -> NoReturn:
        raise error

    return function


ODD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda x: x.to_sparse(), "layout torch.sparse_coo"),
    "meta": (lambda x: x.to("meta"), "on meta"),
    "uint64": (lambda x: x.to(torch.uint64), "torch.uint64"),
    "none": (lambda _: None, "NoneType"),
    "larger-than-memory": (lambda x: x[:1, :1].expand(10**7, 10**7), "allocate"),
    "endless-text": (raising(ValueError("x" * (8 << 20))), "xxx [...] xxx"),
    "half-a-character": (raising(ValueError("file \udcff")), "file \\udcff"),
    "no-text": (raising(WithoutText()), "WithoutText, whose text cannot be had (RuntimeError)"),
    "no-text-at-all": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "exit": (raising(SystemExit(3)), "SystemExit: 3"),
}


@pytest.fixture(scope="module")
def client() -> Iterator[WireClient]:
    experts = {name: Odd(function) for name, (function, _) in ODD.items()} | {"good": nn.Linear(D, D)}
    with (
        ExpertsServer(experts, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as server,
        WireClient(server.address) as client,
    ):
        yield client


@pytest.mark.parametrize("keep_graph", [True, False])
@pytest.mark.parametrize("name", ODD)
def test_what_it_does_fails_alone_is_told_and_is_no_different_the_next_time(
    client: WireClient, name: str, keep_graph: bool
) -> None:
    for _ in range(2):
        calls = [
            client.forward_call(each, tokens(2, D), keep_graph=keep_graph) for each in ("good", name, "good")
        ]
        before, odd, after = client.stream("Forward", calls)
        assert (before.code, after.code) == ("OK", "OK")
        assert odd.code == ("INTERNAL" if name == "larger-than-memory" else "EXPERT_FAILED")
        assert ODD[name][1] in odd.text
        assert len(odd.text) < 3000


ENTERED: list[object] = []  # what a thread is in may end with the object that was entered


def enter(mode: Any) -> None:
    ENTERED.append(mode)
    mode.__enter__()


class ZerosInPlace(TorchFunctionMode):
    """Makes zeros of what is added."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0 if func is Tensor.add else result


class ZerosOfProducts(TorchDispatchMode):
    """Makes zeros of what is multiplied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func is torch.ops.aten.addmm.default else result


def autocast_twice() -> None:
    for _ in range(2):
        enter(torch.autocast("cpu", torch.bfloat16))


# What some scripts do in their first lines; torch remembers it for the thread.
LEFT_ON: dict[str, Callable[[], Any]] = {
    "no gradients": lambda: torch.set_grad_enabled(False),
    "inference": lambda: enter(torch.inference_mode()),
    "autocast": lambda: enter(torch.autocast("cpu", torch.bfloat16)),
    "autocast twice": autocast_twice,
    "autocast to another dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "function mode": lambda: enter(ZerosInPlace()),
    "dispatch mode": lambda: enter(ZerosOfProducts()),
    "device": lambda: torch.set_default_device("meta"),
    "hooks": lambda: enter(torch.autograd.graph.saved_tensors_hooks(torch.zeros_like, lambda saved: saved)),
}


class LeavesOn(nn.Linear):
    """Does it in its forward."""

    def __init__(self, width: int, what: str) -> None:
        super().__init__(width, width)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        LEFT_ON[self.what]()
        return y


class Shifted(nn.Linear):
    """Makes a tensor in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(x.shape[-1])


@pytest.mark.parametrize("what", LEFT_ON)
def test_what_one_leaves_on_changes_no_other(what: str) -> None:
    width = 1024  # too large to be computed where it comes in: both run on the workers
    experts = {"odd": LeavesOn(width, what), "good": Shifted(width, width)}
    x = tokens(4, width)
    with ExpertsServer(experts) as server, WireClient(server.address) as client:
        for call_id in range(4):
            assert client.forward("odd", x, call_id=call_id).code == "OK"
            answer = client.forward("good", x, call_id=call_id)
            assert answer.code == "OK", answer.text
            torch.testing.assert_close(answer.tensors[0], experts["good"](x), rtol=1e-5, atol=1e-5)
            (grad,) = client.backward("good", torch.ones(4, width), call_id=call_id).tensors
            assert grad is not None, "its forward had no graph"
            torch.testing.assert_close(grad, experts["good"].weight.sum(0).expand(4, width))


class Cast(nn.Linear):
    """Has an autocast of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return super().forward(x)


@pytest.mark.parametrize("what", ["autocast", "autocast twice", "autocast to another dtype"])
def test_what_one_leaves_on_changes_no_autocast_of_another(what: str) -> None:
    width = 1024
    experts = {"odd": LeavesOn(width, what), "cast": Cast(width, width)}
    x, cast = tokens(4, width), experts["cast"]
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    with ExpertsServer(experts, optimizer=sgd) as server, WireClient(server.address) as client:
        for call_id in range(3):
            assert client.forward("odd", x, call_id=call_id).code == "OK"
            (y,) = client.forward("cast", x, call_id=call_id).tensors
            weights = [one.detach().bfloat16() for one in (cast.weight, cast.bias)]
            torch.testing.assert_close(y, nn.functional.linear(x.bfloat16(), *weights))
            assert client.backward("cast", torch.ones_like(y), call_id=call_id).code == "OK"
            client.step("cast")


@pytest.mark.parametrize("what", LEFT_ON)
def test_what_a_file_leaves_on_changes_no_other_expert(what: str, tmp_path: Path) -> None:
    """Small ones are computed on the thread that has imported it."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "from tests.server.test_odd_experts import LEFT_ON\n"
        f"LEFT_ON[{what!r}]()\n"
        "class Scale(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(4, device='cpu'))\n"
        "    def forward(self, x):\n"
        "        return x * self.weight\n"
    )
    (tmp_path / "server.toml").write_text(
        """
        listen = "127.0.0.1:0"
        optimizer = { name = "sgd", lr = 0.1 }
        [experts.before]
        class = "torch.nn:Linear"
        args = { in_features = 4, out_features = 4 }
        [experts.odd]
        class = "script:Scale"
        [experts.after]
        class = "torch.nn:Linear"
        args = { in_features = 4, out_features = 4, device = "cpu" }
        """
    )
    x = tokens(3, 4)
    with (
        ServerProcess("--config", str(tmp_path / "server.toml"), path=tmp_path) as server,
        WireClient(server.address) as client,
    ):
        state = client.get_state()
        for name in ("before", "odd", "after"):
            answer = client.forward(name, x)
            assert answer.code == "OK", answer.text
            weight, bias = state[name]["weight"], state[name].get("bias")
            expected = x * weight if bias is None else nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(answer.tensors[0], expected)
            answer = client.backward(name, torch.ones(3, 4))
            assert answer.code == "OK", answer.text
            assert answer.tensors[0] is not None
        assert [update.num_updates for update in client.step().updates] == [1, 1, 1]


def test_a_file_that_goes_to_another_folder_takes_no_checkpoint_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would begin anew, elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "goes.py").write_text(
        "import os, torch\nos.chdir('elsewhere')\nclass Goes(torch.nn.Identity): pass\n"
    )
    flags = ("--expert", "goes:Goes", "--checkpoint-dir", "saved")
    monkeypatch.chdir(tmp_path)
    with ServerProcess(*flags, path=tmp_path) as server:
        assert server.stop() == 0
    assert (tmp_path / "saved").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_refusal_that_names_many_long_keys_arrives_as_what_it_is(client: WireClient) -> None:
    """grpc takes 8 KiB of details, and would make another error of more."""
    wrong = {"good": {f"{n}." + "of.another.module." * 8: torch.zeros(1) for n in range(60)}}
    with pytest.raises(Exception, match="INVALID_ARGUMENT") as refused:
        client.set_state(wrong)
    assert "Use a state of the same class and arguments." in str(refused.value)


class SparseRows(nn.Module):
    """Its gradients are sparse, both of its weight and of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(3, D, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.tensor([2, 0])
        return self.rows(index) * nn.functional.embedding(index, x, sparse=True)


def test_sparse_gradients_train_as_in_torch() -> None:
    local, hosted = SparseRows(), SparseRows()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    with (
        ExpertsServer(
            {"e": hosted}, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        ) as server,
        connect(server.address) as experts,
    ):
        remote = RemoteOptimizer(experts)
        for step in range(3):
            x_local, x_remote = (tokens(3, D, seed=step).requires_grad_() for _ in range(2))
            optimizer.zero_grad()
            local(x_local).square().sum().backward()
            optimizer.step()
            remote.zero_grad()
            experts["e"](x_remote).square().sum().backward()
            remote.step()
            assert x_local.grad is not None
            torch.testing.assert_close(x_remote.grad, x_local.grad.to_dense())
    torch.testing.assert_close(hosted.rows.weight, local.rows.weight)


class SlowToTell(nn.Linear):
    """Notes on which threads it is asked for its state and parameters, which may take any time."""

    asked_on: tuple[str, ...] = ()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.asked_on += (threading.current_thread().name,)
        return super().state_dict(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        self.asked_on += (threading.current_thread().name,)
        return super().parameters(recurse)


def test_a_module_is_not_asked_what_it_consists_of_while_other_clients_wait() -> None:
    """What tells it on the server's event loop holds up everybody, and health checks."""
    module = SlowToTell(D, D)
    with ExpertsServer({"e": module}) as server, WireClient(server.address) as client:
        state = {"e": {"weight": torch.zeros(D, D), "bias": torch.ones(D)}}
        before = len(module.asked_on)
        assert [entry.key for entry in client.info().layouts[0].entries] == ["weight", "bias"]
        client.set_state(state)
        assert "experts-server-loop" not in module.asked_on[before:]
        torch.testing.assert_close(client.get_state(), state)


def test_a_module_that_cannot_tell_its_state_is_refused_by_name() -> None:
    class Secretive(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("it is secret")

    with pytest.raises(
        ConfigError, match=r"expert 'e': expected .* state_dict, .* got LookupError: it is secret"
    ):
        ExpertsServer({"e": Secretive(D, D)}).start()


class Quantized(nn.Linear):
    """Keeps its weight as whole numbers, as quantized layers do."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.weight = nn.Parameter(
            torch.randint(-9, 9, (width, width), dtype=torch.int8), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) / 9, self.bias)


@pytest.mark.parametrize("make", [lambda quantized: quantized, nn.Sequential])
def test_a_layer_that_is_derived_from_linear_is_not_thought_to_take_what_its_weight_is(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    hosted, x = make(Quantized(D)), tokens(3, D)
    with ExpertsServer({"e": hosted}) as server, connect(server.address) as experts:
        torch.testing.assert_close(experts["e"](x), hosted(x))


@pytest.mark.parametrize("part", ["up", "gate"])
def test_nor_is_a_built_in_expert_with_such_a_layer(part: str) -> None:
    hosted = FeedForwardExpert(D, d_ff=D) if part == "up" else SwiGLUExpert(D, d_ff=D)
    setattr(hosted, part, Quantized(D))
    x = tokens(3, D)
    with ExpertsServer({"e": hosted}) as server, connect(server.address) as experts:
        torch.testing.assert_close(experts["e"](x), hosted(x))


def test_hosting_computes_no_parametrized_weight() -> None:
    """In training each look at a spectrally normalized one goes on with its power iteration."""
    hosted = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))
    before = copy.deepcopy(hosted.state_dict())
    with ExpertsServer({"e": hosted}) as server, connect(server.address) as experts:
        torch.testing.assert_close(experts["e"].state_dict(), dict(before), rtol=0, atol=0)


class Bare(nn.Linear):
    """Computes as a linear layer does."""


@pytest.mark.parametrize("hosted", [Bare(D, D), nn.utils.parametrizations.weight_norm(nn.Linear(D, D))])
def test_a_derived_layer_with_the_forward_of_linear_takes_what_linear_takes(hosted: nn.Module) -> None:
    x = tokens(3, D)
    with ExpertsServer({"e": hosted}) as server, connect(server.address) as experts:
        with torch.autocast("cpu", torch.bfloat16):
            assert experts["e"](x.bfloat16()).dtype is torch.float32
        with pytest.raises(InvalidCallError, match=rf"expected shape \(..., {D}\), got \(3, 1\)"):
            experts["e"](x[:, :1])


def test_weights_that_are_made_of_other_tensors_are_refused_by_name() -> None:
    hosted = nn.Linear(D, D)
    hosted.weight = nn.Parameter(TwoTensor(torch.ones(D, D), torch.ones(D, D)))
    with pytest.raises(ConfigError, match=r"expert 'e': .* got TwoTensor, .* other tensors \(key='weight'\)"):
        ExpertsServer({"e": hosted}).start()


def test_weights_without_values_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"expert 'e': expected weights with values, got 'weight' on meta"):
        ExpertsServer({"e": nn.Linear(D, D, device="meta")}).start()
