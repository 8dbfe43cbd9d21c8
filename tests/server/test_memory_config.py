"""The configuration of a server that saves memory: mistakes are named, and an expert may differ from the others."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, OffloadConfig, ServingConfig
from experts_server.configuration.settings import load_config
from moe_autograd.errors import ConfigError
from tests.support.saving_memory import D, sgd
from tests.support.servers import WireClient

FFN: dict[str, Any] = {"class": "ffn", "args": {"d_model": D}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"memory": {"recompute": True, "offload": True}},
            "key 'experts.e.memory.offload': expected a table [offload] that sets max_resident_bytes",
        ),
        (
            {"memory": {"offload": True}, "offload": {"max_resident_bytes": 1000}},
            "key 'experts.e.memory.recompute': expected true with offload = true, got false",
        ),
        (
            {"memory": {"split_backward": True}, "update": "on_backward"},
            "key 'experts.e.memory.split_backward': expected false with update = 'on_backward', got true",
        ),
        ({"memory": {"recompute": "maybe"}}, "key 'memory.recompute': expected true or false"),
        ({"memory": {"recompte": True}}, "expected one of offload, prefetch, recompute, split_backward"),
        (
            {"offload": {"max_resident_bytes": 0}},
            "key 'offload.max_resident_bytes': expected greater than 0, got 0",
        ),
        ({"offload": {"store": "ram"}}, "key 'offload.max_resident_bytes': expected a value, got none"),
        ({"offload": {"max_resident_bytes": 5, "store": 3}}, "key 'offload.store"),
    ],
)
def test_a_mistake_in_the_configuration_names_key_value_and_what_is_allowed(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(flags={"experts": {"e": FFN}, **settings}, environment={})
    assert text in str(refused.value)


def test_an_expert_says_key_by_key_how_it_differs_from_the_others() -> None:
    config = load_config(
        flags={
            "memory": {"recompute": True, "offload": True},
            "offload": {"max_resident_bytes": 1 << 20},
            "experts": {"a": FFN, "b": {**FFN, "memory": {"offload": False, "split_backward": True}}},
        },
        environment={},
    )
    a, b = (config.memory_of(config.experts[name]) for name in "ab")
    assert (a.recompute, a.offload, a.split_backward) == (True, True, False)
    assert (b.recompute, b.offload, b.split_backward) == (True, False, True)


def test_an_embedded_server_refuses_the_same() -> None:
    config = ServingConfig(memory=MemoryConfig(split_backward=True))
    with pytest.raises(
        ConfigError, match=r"memory.split_backward: expected false with update = 'on_backward'"
    ):
        ExpertsServer({"e": nn.Linear(2, 2)}, optimizer=sgd, update="on_backward", config=config)


def test_an_expert_for_which_there_will_never_be_room_is_refused_at_the_start() -> None:
    memory, offload = MemoryConfig(recompute=True, offload=True), OffloadConfig(max_resident_bytes=100)
    with pytest.raises(ConfigError, match=r"expert 'e', key 'offload.max_resident_bytes': .* of at least"):
        ExpertsServer(
            {"e": nn.Linear(20, 20)}, optimizer=sgd, config=ServingConfig(memory=memory, offload=offload)
        ).start()


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.Adam, torch.optim.Adafactor, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)],
    ids=["Adam", "Adafactor", "SGD with momentum"],
)
def test_room_for_what_the_optimizer_will_keep_is_looked_for_at_the_start(optimizer: Any) -> None:
    def train(max_resident_bytes: int) -> None:
        memory = MemoryConfig(recompute=True, offload=True)
        config = ServingConfig(memory=memory, offload=OffloadConfig(max_resident_bytes=max_resident_bytes))
        hosted: dict[str, nn.Module] = {f"e.{index}": nn.Linear(32, 32) for index in range(3)}
        with (
            ExpertsServer(hosted, optimizer=optimizer, config=config) as server,
            WireClient(server.address) as client,
        ):
            client.forward("e.1", torch.ones(1, 32))
            client.backward("e.1", torch.ones(1, 32))
            client.step()
            assert client.num_updates()["e.1"] == 1

    with pytest.raises(ConfigError, match=r"expert 'e\.0', key 'offload\.max_resident_bytes'") as refused:
        train(2 * 33 * 32 * 4 + 64)  # weights and gradients
    needed = re.search("at least ([0-9]+)", str(refused.value))
    assert needed is not None
    train(int(needed[1]))
