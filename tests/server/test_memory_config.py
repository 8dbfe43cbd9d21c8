"""The configuration of a server that saves memory: mistakes are named, and an expert may differ from the others."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from experts_server import ExpertsServer
from experts_server.config import MemoryConfig, OffloadConfig, ServingConfig
from experts_server.settings import load_config
from moe_autograd.errors import ConfigError
from tests.support.saving_memory import D, sgd

FFN: dict[str, Any] = {"class": "ffn", "args": {"d_model": D}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"memory": {"recompute": True, "offload": True}},
            "key 'experts.e.memory.offload': expected a table [offload] with max_resident_bytes",
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
