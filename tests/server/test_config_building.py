"""What a configuration is made into: modules and their training, and whose mistake it is if it cannot be."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch

from experts_server.configuration.config import OptimizerConfig, ScheduleConfig, ServerConfig
from experts_server.configuration.settings import load_config
from experts_server.hosting.building import build_module, build_training
from experts_server.serving.configured import check_buildable, from_config
from moe_autograd.errors import ConfigError

FFN = {"class": "ffn", "args": {"d_model": 8}}


def checked(settings: dict[str, Any]) -> ServerConfig:
    return load_config(flags=settings, environment={})


class Broken(torch.nn.Module):
    """Raises something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1 / 0


class Script(torch.nn.Module):
    """Reads the arguments of the process, as the rest of its file would."""

    def __init__(self) -> None:
        sys.exit(2)


@pytest.mark.parametrize(
    ("expert", "text"),
    [
        (
            {"class": "fnn"},
            "one of ffn, swiglu, transformer, identity or module:Class, got 'fnn'. Did you mean 'ffn'?",
        ),
        ({"class": "zzz"}, "or module:Class, got 'zzz'."),
        (
            {"class": "swiglu"},
            "required positional arguments: 'd_model' and 'd_ff'). Add d_model, d_ff (as flags: ",
        ),
        ({"class": "swiglu", "args": {"d_model": 4}}, "). Add d_ff (as flags: --d-ff)."),
        ({"class": "torch.nn.Linear"}, "got 'torch.nn.Linear'. Did you mean 'torch.nn:Linear'?"),
        (
            {"class": "no.such.module:X"},
            "got 'no.such.module:X' (ModuleNotFoundError: No module named 'no'). Is",
        ),
        ({"class": "torch:nn.Linear"}, "). Did you mean 'torch.nn:Linear'?"),
        ({"class": "torch.nn:NoSuch"}, "expected a class that can be imported, got 'torch.nn:NoSuch'"),
        ({"class": ":NoSuch"}, "expected a class that can be imported, got ':NoSuch'"),
        ({"class": "..up:NoSuch"}, "expected a class that can be imported, got '..up:NoSuch'"),
        ({"class": "tests.server.test_config_building:Broken"}, "ZeroDivisionError: division by zero, "),
        ({"class": "tests.server.test_config_building:Broken"}, "test_config_building.py:"),
        (
            {"class": "tests.server.test_config_building:Script"},
            "key 'args': expected Script to do without any, got SystemExit: 2, ",
        ),
        (
            {"class": "tests.server.test_config_building:Broken", "args": {"x": 1}},
            "expected no arguments, got {'x': 1}",
        ),
        (
            {"class": "ffn", "args": {"width": 3}},
            "key 'args': expected arguments that it takes (d_model, d_ff, activation, device, dtype), got {'width': 3}",
        ),
        ({"class": "ffn", "args": {"d_model": -3}}, "key 'args': expected arguments that it takes"),
        (
            {"class": "builtins:type", "args": {"x": 1}},
            "key 'args': expected arguments that it takes, got {'x': 1}",
        ),
        (
            {"class": "ffn", "args": {"d_model": 4, "activation": "relu"}},
            "(TypeError: FeedForwardExpert: expected activation to be a function of a tensor, got 'relu'.",
        ),
        (
            {"class": "swiglu", "args": {"d_model": 4, "d_ff": 8, "dtype": "complex64"}},
            "key 'args.dtype': expected a floating dtype, such as 'bfloat16', got 'complex64'",
        ),
        (
            {"class": "ffn", "args": {"d_model": 4, "dtype": "bf16"}},
            "key 'args.dtype': expected the name of a torch.dtype, such as 'bfloat16', got 'bf16'.",
        ),
        (
            {"class": "transformer", "args": {"d_model": 4, "dtype": "bfloat16"}},
            "key 'args': expected arguments that it takes (d_model,",
        ),
        (
            {"class": "math:pi"},
            "key 'class': expected a class, or a function that makes a module, got 'math:pi', which is of type float.",
        ),
        ({"class": "builtins:dict"}, "expected a torch.nn.Module, got dict from 'builtins:dict'"),
        (
            {"class": "torch.nn:LazyLinear", "args": {"out_features": 4}},
            "key 'args': expected weights with values, got 'weight' without a shape",
        ),
        (
            {"class": "ffn", "args": {"d_model": 4, "device": "meta"}},
            "key 'args': expected weights with values, got 'up.weight' on meta",
        ),
        ({**FFN, "optimizer": {"name": "Adm"}}, "expected one of ASGD, Adadelta"),
        (
            {**FFN, "optimizer": {"name": "adma"}},
            "(in any case), got 'adma'. Did you mean 'Adamax' or 'Adam'?",
        ),
        (
            {**FFN, "optimizer": {"schedule": {"name": "steplrr", "args": {}}}},
            "(in any case), got 'steplrr'. Did you mean 'StepLR' or",
        ),
        (
            {**FFN, "optimizer": {"args": {"nope": 1}}},
            "key 'optimizer.args': expected arguments that it takes (betas, eps, weight_decay,",
        ),
        (
            {**FFN, "optimizer": {"name": "muon"}},
            "key 'optimizer.args': expected Muon to do without any, got ValueError: Muon only supports 2D parameters",
        ),
        ({**FFN, "optimizer": {"schedule": {"name": "x"}}}, "key 'optimizer.schedule.name': expected one of"),
        ({**FFN, "optimizer": {"name": "lbfgs"}}, "got 'LBFGS', which wants a closure"),
        (
            {**FFN, "optimizer": {"schedule": {"name": "ReduceLROnPlateau"}}},
            "which wants a metric at each step",
        ),
        ({**FFN, "optimizer": {"schedule": {"name": "LambdaLR"}}}, "got 'LambdaLR', which wants a function"),
        (
            {**FFN, "optimizer": {"schedule": {"name": "sequentiallr"}}},
            "got 'SequentialLR', which wants other schedules (OneCycleLR alone warms up",
        ),
        ({**FFN, "optimizer": {"schedule": {"name": "StepLR"}}}, "key 'optimizer.schedule.args': expected"),
        (
            {"class": "ffn", "args": {"d_model": 1 << 63}},
            "Overflow when unpacking long long, ",
        ),
    ],
)
def test_what_cannot_be_built_names_expert_key_and_value(expert: dict[str, Any], text: str) -> None:
    config = checked({"experts": {"e.0": expert}})
    with pytest.raises(ConfigError) as refused:
        from_config(config)
    assert text in str(refused.value)
    assert "'e.0'" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


class Named(torch.nn.Identity):
    """Takes the name of a dtype, and not a dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("class_name", "args"),
    [
        ("ffn", {"d_model": 4}),
        ("swiglu", {"d_model": 4, "d_ff": 8}),
        ("torch.nn:Linear", {"in_features": 4, "out_features": 4}),
        ("tests.server.test_config_building:Named", {}),
    ],
)
def test_a_dtype_is_named_and_only_classes_of_others_get_the_name_itself(
    class_name: str, args: dict[str, Any]
) -> None:
    expert = {"class": class_name, "args": {**args, "dtype": "bfloat16"}}
    module = build_module("e", checked({"experts": {"e": expert}}).experts["e"], 0)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_an_optimizer_that_is_refused_is_not_offered() -> None:
    config = checked({"experts": {"e": {**FFN, "optimizer": {"name": "Adm"}}}})
    with pytest.raises(ConfigError, match="Adam, AdamW") as refused:
        from_config(config)
    assert not any(name in str(refused.value) for name in ("LBFGS", "SparseAdam"))


def test_a_schedule_that_no_file_can_describe_is_not_offered() -> None:
    config = checked({"experts": {"e": {**FFN, "optimizer": {"schedule": {"name": "warmup"}}}}})
    with pytest.raises(ConfigError, match="LinearLR, MultiStepLR, OneCycleLR") as refused:
        from_config(config)
    assert not any(name in str(refused.value) for name in ("LambdaLR", "SequentialLR", "ChainedScheduler"))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("CosineAnnealingLR", {"T_max": 0}),
        ("CosineAnnealingLR", {"T_max": "a"}),
        ("StepLR", {"step_size": 0}),
    ],
)
def test_a_schedule_that_cannot_be_stepped_is_refused(name: str, args: dict[str, Any]) -> None:
    """Else the first update would be the last one."""
    optimizer = {"name": "adam", "schedule": {"name": name, "args": args}}
    with pytest.raises(ConfigError, match=r"key 'optimizer\.schedule\.args': expected arguments") as refused:
        from_config(checked({"experts": {"e": {**FFN, "optimizer": optimizer}}}))
    assert f"got {args} (" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 1}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0}),
        ("LinearLR", {}),
        ("PolynomialLR", {"total_iters": 1}),
    ],
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_schedule_that_can_begins_where_it_did(optimizer: str, name: str, args: dict[str, Any]) -> None:
    """Trying it has not stepped it, and it may end with its first step."""
    own = {"momentum": 0.9} if optimizer == "sgd" else {}
    module = torch.nn.Linear(3, 2)
    schedule = ScheduleConfig(name=name, args=args)
    config = OptimizerConfig(name=optimizer, lr=0.5, args=own, schedule=schedule)
    training = build_training("e", module, config, "on_step")
    assert training is not None
    assert training.schedule is not None
    assert training.schedule.last_epoch == 0
    assert [id(p) for group in training.optimizer.param_groups for p in group["params"]] == [
        *map(id, module.parameters())
    ]


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_options_with_which_no_step_succeeds_are_refused(option: str) -> None:
    optimizer = {"name": "adam", "args": {option: True}}
    with pytest.raises(ConfigError, match=f"optimizer.args': expected arguments .* got '{option}', which"):
        from_config(checked({"experts": {"e": {**FFN, "optimizer": optimizer}}}))


@pytest.mark.parametrize("name", ["sgd", "ADAM", "AdamW", "rmsprop", "Adagrad"])
def test_any_optimizer_of_torch_is_built_by_name(name: str) -> None:
    config = checked(
        {"experts": {"e": FFN}, "optimizer": {"name": name, "lr": 0.25, "args": {"weight_decay": 0.5}}}
    )
    module = build_module("e", config.experts["e"], 0)
    training = build_training("e", module, config.optimizer_of(config.experts["e"]), "on_step")
    assert training is not None
    assert type(training.optimizer).__name__.lower() == name.lower()
    assert (training.optimizer.defaults["lr"], training.optimizer.defaults["weight_decay"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("name", "args", "dtype", "is_fused"),
    [
        ("adam", {}, torch.float32, True),
        ("adamw", {"amsgrad": True, "weight_decay": 0.1}, torch.float64, True),
        ("sgd", {"momentum": 0.9, "nesterov": True}, torch.float32, True),
        ("adagrad", {}, torch.float32, True),
        ("adam", {"fused": False}, torch.float32, False),
        ("adam", {"foreach": True}, torch.float32, False),
        ("adam", {}, torch.bfloat16, False),
        ("adam", {}, torch.complex64, False),
        ("rmsprop", {}, torch.float32, False),
    ],
)
def test_the_fastest_steps_of_torch_are_taken_where_they_are_the_same(
    name: str, args: dict[str, Any], dtype: torch.dtype, is_fused: bool
) -> None:
    torch.manual_seed(0)
    hosted = torch.nn.Linear(70, 30, dtype=dtype)
    local = copy.deepcopy(hosted)
    config = OptimizerConfig(name=name, lr=0.1, args=args)
    training = build_training("e", hosted, config, "on_step")
    assert training is not None
    assert bool(training.optimizer.defaults.get("fused")) is is_fused
    plain = type(training.optimizer)(local.parameters(), lr=0.1, **args)
    for _ in range(20):
        for one, other in zip(hosted.parameters(), local.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        training.optimizer.step()
        plain.step()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype] if is_fused else 0.0
    torch.testing.assert_close(hosted.state_dict(), local.state_dict(), rtol=tolerance, atol=tolerance)


def test_only_what_is_not_frozen_is_trained() -> None:
    module, config = torch.nn.Linear(3, 2), OptimizerConfig(name="sgd", lr=0.1)
    module.weight.requires_grad_(False)
    training = build_training("e", module, config, "on_step")
    assert training is not None
    assert [id(p) for group in training.optimizer.param_groups for p in group["params"]] == [id(module.bias)]
    module.bias.requires_grad_(False)
    assert build_training("e", module, config, "on_step") is None


def test_a_module_of_the_users_own_is_built_from_module_and_class() -> None:
    config = checked(
        {"experts": {"e": {"class": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 2}}}}
    )
    assert build_module("e", config.experts["e"], 0).weight.shape == (2, 3)


def test_the_same_seed_gives_the_same_weights_other_experts_others_and_leaves_the_callers_stream_alone() -> (
    None
):
    config = checked({"experts": {"ffn.[0:4]": FFN}})
    torch.manual_seed(5)
    first, again = (build_module("ffn.0", config.experts["ffn.0"], 1) for _ in range(2))
    other = build_module("ffn.1", config.experts["ffn.1"], 1)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    torch.testing.assert_close(first.state_dict(), again.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first.up.weight, other.up.weight)


def test_an_optimizer_that_does_not_exist_is_refused_also_where_it_is_not_used() -> None:
    frozen = {**FFN, "eval_only": True}
    for optimizer, key in (({"name": "adamx"}, "name"), ({"name": "sgd", "args": {"x": 1}}, "args")):
        own = {"experts": {"e": {**frozen, "optimizer": optimizer}}}
        for settings in (own, {"experts": {"e": frozen}, "optimizer": optimizer}):
            with pytest.raises(ConfigError, match=rf"expert 'e', key 'optimizer\.{key}': expected"):
                check_buildable(checked(settings))
    check_buildable(checked({"experts": {"e": {**frozen, "optimizer": "none"}}}))


def test_an_eval_only_expert_is_not_trained() -> None:
    config = checked({"experts": {"e": {**FFN, "eval_only": True}}})
    assert config.optimizer_of(config.experts["e"]) is None
    assert not build_module("e", config.experts["e"], 0).training
