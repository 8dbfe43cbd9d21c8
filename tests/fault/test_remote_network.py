"""A network that cuts, damages, delays or is slow, between a client and a real server: nothing is counted twice,
nothing is lost, and no number is silently wrong."""

from __future__ import annotations

import copy
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import DeadlineExceededError, RemoteError, ServerUnavailableError
from moe_autograd.remote import TLS, RemoteOptimizer, RetryPolicy, connect, link
from moe_autograd.remote.channel import Channel
from tests.support.certificates import make_certificates
from tests.support.proxy import Proxy
from tests.support.scale import Scale

X = torch.ones(1, 4)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def train_beside_a_twin(proxy_faults: dict[str, float], num_steps: int, update: str = "on_step") -> Proxy:
    """Train an expert through a faulty proxy and its twin here; every number must be the same bit for bit."""
    torch.manual_seed(0)
    module = Scale(32)
    twin = copy.deepcopy(module)
    retry = RetryPolicy(patience_s=100.0, budget=1000.0, max_retries=100, update_attempt_s=2.0)
    with (
        ExpertsServer({"ffn.0": module}, optimizer=adam, update=update) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=200.0, retry=retry) as experts,
    ):
        optimizer, local_optimizer = RemoteOptimizer(experts), adam(twin.parameters())
        for fault, value in proxy_faults.items():
            setattr(proxy, fault, value)
        for _ in range(num_steps):
            x = torch.randn(16, 32, requires_grad=True)
            local_x = x.detach().clone().requires_grad_()
            optimizer.zero_grad()
            local_optimizer.zero_grad()
            y, local_y = experts["ffn.0"](x), twin(local_x)
            assert torch.equal(y, local_y)
            y.square().sum().backward()
            local_y.square().sum().backward()
            assert torch.equal(x.grad, local_x.grad)
            optimizer.step()
            local_optimizer.step()
            assert torch.equal(module.weight, twin.weight)
        assert server.num_updates["ffn.0"] == num_steps
    return proxy


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_cut_connections_lose_nothing_and_count_nothing_twice(update):
    proxy = train_beside_a_twin({"cut_chance": 0.05}, num_steps=40, update=update)
    assert proxy.num_cut > 5


def test_a_delay_changes_nothing():
    train_beside_a_twin({"delay_s": 0.01}, num_steps=3)


def test_a_slow_link_is_not_taken_for_a_dead_one_for_long():
    """4 MiB each way at 2 MB/s: pings wait for seconds behind the tensor."""
    with (
        ExpertsServer({"echo": nn.Identity()}) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=200.0, retry=RetryPolicy(patience_s=100.0)) as experts,
    ):
        proxy.bytes_per_s = 2e6
        x = torch.randn(1024, 1024)
        assert torch.equal(experts["echo"](x), x)


class _Wide(nn.Module):
    """Answers a number with megabytes."""

    def forward(self, x):
        return x.expand(1024, 1024).clone()


@pytest.mark.parametrize(("what", "num_connections"), [("upload", 3), ("download", 1)])
def test_a_slow_link_carries_what_takes_longer_than_pings_are_waited_for(what, num_connections):
    """4 MiB one way at 0.5 MB/s. grpc's own pings wait behind them, too, and those of the server had 3 s.

    The client's limit grows with each connection that it breaks, twice; what comes in shows that its server is there.
    """
    x = torch.randn(1024, 1024) if what == "upload" else torch.ones(1, 1)
    with (
        ExpertsServer({"upload": nn.Linear(1024, 1), "download": _Wide()}) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=90.0, retry=RetryPolicy(patience_s=100.0)) as experts,
        torch.no_grad(),
    ):
        proxy.bytes_per_s = 5e5
        experts[what](x)
        assert proxy.num_accepted <= num_connections


@pytest.mark.parametrize("what", ["forward", "backward", "state_dict", "load_state_dict"])
def test_a_deadline_is_kept_in_the_middle_of_a_transfer(monkeypatch, what):
    """A message of 1 MiB is on its way for 10 s here; without pings, which would end the connection before that."""
    without_pings = tuple(option for option in link.CHANNEL_OPTIONS if "keepalive" not in option[0])
    monkeypatch.setattr(link, "CHANNEL_OPTIONS", without_pings)
    with (
        ExpertsServer({"wide": nn.Linear(1024, 1024)}) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=3.0) as experts,
    ):
        x = torch.randn(1024, 1024, requires_grad=True)
        y, state = experts["wide"](x), experts.state_dict()
        operations: dict[str, Callable[[], object]] = {
            "forward": lambda: experts["wide"](x),
            "backward": lambda: y.sum().backward(),
            "state_dict": experts.state_dict,
            "load_state_dict": lambda: experts.load_state_dict(state),
        }
        proxy.bytes_per_s = 1e5
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"after 3\.\d s \(deadline 3\.0 s\)"):
            operations[what]()
        assert time.monotonic() - began_s < 6.0


def keep_a_deadline_where_packets_vanish(what: str) -> None:
    retry = RetryPolicy(patience_s=1000.0)
    with (
        ExpertsServer({"scale": Scale(8)}, optimizer=adam) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=5.0, retry=retry) as experts,
    ):
        optimizer, y = RemoteOptimizer(experts), experts["scale"](torch.ones(1, 8))
        experts["scale"](torch.ones(1, 8)).sum().backward()
        operations: dict[str, Callable[[], object]] = {
            "connect": lambda: connect(proxy.address, timeout_s=5.0, retry=retry),
            "info": experts.info,
            "forward": lambda: experts["scale"](torch.ones(1, 8)),
            "backward": lambda: y.sum().backward(),
            "step": optimizer.step,
            "state_dict": experts.state_dict,
        }
        proxy.is_black_hole = True
        began_s = time.monotonic()
        with pytest.raises((DeadlineExceededError, ServerUnavailableError), match=r"deadline 5\.0 s"):
            operations[what]()
        assert time.monotonic() - began_s < 8.0, what


def test_a_deadline_is_kept_where_packets_vanish_and_nobody_loses_patience():
    """Looking for a server that says nothing, connecting to it, and trying again: all of it under one deadline."""
    whats = ("connect", "info", "forward", "backward", "step", "state_dict")
    with ThreadPoolExecutor(len(whats)) as waits:  # each for 5 s
        list(waits.map(keep_a_deadline_where_packets_vanish, whats))


def test_all_calls_and_threads_share_one_connection():
    modules = {f"ffn.{index}": Scale(8) for index in range(8)}
    with (
        ExpertsServer(modules, optimizer=adam) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=200.0, retry=RetryPolicy(patience_s=100.0)) as experts,
    ):

        def work() -> None:
            for _ in range(5):
                outputs = parallel_apply(list(experts.values()), [(torch.ones(1, 8),)] * len(experts))
                sum(y.sum() for y in outputs).backward()
                experts.state_dict()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        RemoteOptimizer(experts).step()
        assert set(server.num_updates.values()) == {1}
        assert proxy.num_accepted == 1


class _DamagesOnce(Proxy):
    """Flips one bit of the next message, in `part` of it; grpc's own 5 bytes are a flag and the length."""

    part = slice(5, None)
    flips_next = False

    def _through(self, chunk, carried, whole):
        self.flip_chance = float(self.flips_next)
        flipped = super()._through(chunk, [frame[self.part] for frame in carried], whole)
        self.flips_next = self.flips_next and not self.num_flipped
        return flipped


@pytest.mark.parametrize("part", [slice(5, None), slice(3, 4)], ids=["message", "length"])
def test_requests_of_one_message_are_made_again_where_they_were_damaged(part):
    """Also where a message seems to be longer than what comes: the server does not wait for the rest."""
    patient = RetryPolicy(update_attempt_s=30.0)
    with ExpertsServer({"ffn.0": Scale(4)}, optimizer=adam) as server, _DamagesOnce(server.address) as proxy:
        proxy.part, proxy.flips_next = part, True
        with connect(proxy.address, retry=patient) as experts:
            optimizer = RemoteOptimizer(experts)
            experts["ffn.0"](torch.ones(1, 4)).sum().backward()
            for request in (experts.info, experts.state_dict, optimizer.step, optimizer.zero_grad):
                assert proxy.num_flipped == 1
                proxy.num_flipped, proxy.flips_next = 0, True
                request()
            assert proxy.num_flipped == 1
        assert server.num_updates == {"ffn.0": 1}


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_without_retries_damage_is_an_error_and_never_a_number(is_encrypted, tmp_path):
    """In the clear our checksums find it, in our messages; under TLS the connection ends."""
    server_security, tls = SecurityConfig(), None
    if is_encrypted:
        make_certificates(tmp_path)
        server_security = SecurityConfig(tls_cert=tmp_path / "server.pem", tls_key=tmp_path / "server.key")
        tls = TLS(tmp_path / "ca.pem", server_name="localhost")
    at_once = RetryPolicy(patience_s=0.0, max_retries=0)
    with (
        ExpertsServer({"echo": nn.Identity()}, config=ServingConfig(security=server_security)) as server,
        Proxy(server.address, is_encrypted=is_encrypted) as proxy,
        connect(proxy.address, timeout_s=3.0, retry=at_once, tls=tls) as experts,
    ):
        proxy.flip_chance = 0.05
        num_errors = 0
        for _ in range(40):
            x = torch.randn(64, 64)
            try:
                assert torch.equal(experts["echo"](x), x)
            except RemoteError:
                num_errors += 1
        assert num_errors > 0
        proxy.flip_chance = 0.0
        with connect(proxy.address, tls=tls) as fresh:
            assert torch.equal(fresh["echo"](x), x)


def test_a_server_that_is_gone_is_tried_several_times_a_second_so_that_its_return_is_seen_soon():
    """Between two attempts grpc lets every call fail as the last one did, though the server may be back."""
    with ExpertsServer({"echo": nn.Identity()}) as server:
        experts = connect(server.address)
    host, port = server.address.split(":")
    at = []
    with experts, socket.create_server((host, int(port))) as refusing, ThreadPoolExecutor(1) as pool:
        called = pool.submit(experts["echo"], X)
        for _ in range(12):
            refusing.accept()[0].close()
            at.append(time.monotonic())
        experts.close()
        assert isinstance(called.exception(60), ServerUnavailableError)
    assert statistics.median(later - sooner for sooner, later in itertools.pairwise(at[-7:])) < 0.5


def test_calls_and_updates_that_come_to_the_wrong_rpc_are_made_again(monkeypatch):
    """Damage to grpc's own headers, which no checksum of ours covers, can change the name of an RPC."""
    other = {"Forward": "Backward", "Backward": "Forward", "Step": "ZeroGrad", "ZeroGrad": "Step"}
    is_damaged, strayed = True, []

    def damaged(rpc: str) -> str:
        nonlocal is_damaged
        is_damaged = not is_damaged and rpc in other
        strayed.extend([rpc] if is_damaged else [])
        return other[rpc] if is_damaged else rpc

    stream = Channel.stream
    monkeypatch.setattr(Channel, "stream", lambda self, rpc, *rest: stream(self, damaged(rpc), *rest))
    train_beside_a_twin({}, num_steps=3)
    assert set(strayed) == set(other)
