"""The configuration: what is allowed, where it comes from, and that every mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experts_server import ExpertsServer
from experts_server.configuration.config import OptimizerConfig, ServerConfig, ServingConfig
from experts_server.configuration.names import check_name, expand_pattern
from experts_server.configuration.settings import load_config
from moe_autograd.errors import ConfigError
from moe_autograd.wire.addresses import split_address

FFN = {"class": "ffn", "args": {"d_model": 8}}
MINIMAL: dict[str, Any] = {"experts": {"ffn.[0:4]": FFN}}


def checked(settings: dict[str, Any]) -> ServerConfig:
    return load_config(flags=settings, environment={})


def test_a_pattern_makes_experts_and_a_later_entry_overrides_one_of_them(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        """
        listen = "127.0.0.1:0"
        [optimizer]
        name = "adam"
        lr = 0.5
        [experts."ffn.[0:3]"]
        class = "ffn"
        args = { d_model = 8 }
        [experts."ffn.1"]
        optimizer = { name = "sgd", lr = 0.1 }
        args = { d_ff = 4 }
        """
    )
    config = load_config(file, environment={})
    assert list(config.experts) == ["ffn.0", "ffn.1", "ffn.2"]
    assert config.experts["ffn.1"].args == {"d_model": 8, "d_ff": 4}
    assert config.seed == 0
    assert load_config(file, {"seed": 0}, {"EXPERTS_SERVER_SEED": "1"}).seed == 0
    optimizers = [config.optimizer_of(expert) for expert in config.experts.values()]
    assert [(o.name, o.lr) for o in optimizers if o] == [("adam", 0.5), ("sgd", 0.1), ("adam", 0.5)]


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('latency_ms = 1\nseed = 1\nupdate = "on_step"\n[experts.e]\nclass = "identity"\n')
    environment = {
        "EXPERTS_SERVER_SEED": "2",
        "EXPERTS_SERVER_UPDATE": "on_backward",
        "EXPERTS_SERVER_LIMITS__MAX_THREADS": "7",
        "OTHER": "x",
    }
    config = load_config(file, {"seed": 3, "listen": None}, environment)
    assert (config.latency_ms, config.update, config.seed) == (1.0, "on_backward", 3)
    assert config.limits.max_threads == 7


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"update": "sometimes"}, "key 'update': expected 'on_step', 'on_backward' or 'on_samples', got 'sometimes'"),
        ({"latency_ms": -1}, "key 'latency_ms': expected greater than or equal to 0, got -1"),
        ({"latency_ms": float("inf")}, "key 'latency_ms': expected"),
        ({"limits": {"max_threads": "many"}}, "key 'limits.max_threads': expected a whole number, got 'many'"),
        ({"limits": {"max_threads": 2.5}}, "key 'limits.max_threads': expected a whole number, got 2.5"),
        ({"latency_ms": "long"}, "key 'latency_ms': expected a number, got 'long'"),
        ({"listen": 3}, "key 'listen': expected a text, got 3"),
        ({"lr": 0.1}, "got an unknown key (value 0.1). Did you mean 'optimizer.lr'?"),
        ({"limits": {"tls_key": "a"}}, "Did you mean 'security.tls_key'?"),
        ({"limits": {"max_queued_calls": -1}}, "key 'limits.max_queued_calls': expected greater than 0, got -1"),
        ({"limits": {"max_tensor_bytes": 1 << 50}}, "expected less than or equal to 1099511627776"),
        ({"limts": {}}, "key 'limts': expected one of batching, checkpoint_dir"),
        ({"limts": {}}, "Did you mean 'limits'?"),
        ({"optimizer": {"weight_decay": 0.1}}, "class go into args = { weight_decay = ... }."),
        ({"optimizer": {"schedule": "CosineAnnealingLR"}}, "expected a table such as { name = "),
        ({"experts": {"a": {**FFN, "d_model": 8}}}, "class go into args = { d_model = ... }."),
        ({"experts": {"ffn": {"0": FFN}}}, 'Names with dots want quotes: [experts."ffn.0"].'),
        ({"experts": {"a": {**FFN, "seed": 1}}}, "seed belongs above the first [table]"),
        ({"experts": {"ffn.[0:32]": {**FFN, "seed": 1}}}, "is part of it. So it is for 31 more experts."),
        ({"listen": "[::1]:8", "metrics_listen": "[::1]:8"}, "another port than that of listen"),
        ({"limits": {"max_thread": 3}}, "Did you mean 'max_threads'?"),
        ({"listen": "here"}, "key 'listen': expected HOST:PORT, such as 127.0.0.1:31415 or [::1]:0, got 'here'"),
        ({"listen": "127.0.0.1:70000"}, "key 'listen': expected a port from 0 to 65535, got '127.0.0.1:70000'"),
        ({"listen": "0.0.0.0:80"}, "key 'listen': expected a loopback address or credentials, got '0.0.0.0:80'"),
        ({"update": "on_samples"}, "key 'experts.ffn.0.samples_per_update': expected a number of rows with update = "),
        ({"update": "on_samples"}, "and none with another, got none with update = 'on_samples'"),
        ({"samples_per_update": 3}, "key 'samples_per_update': expected none with update = 'on_step', got 3"),
        ({"experts": {"e": {**FFN, "samples_per_update": 3}}}, "none with another, got 3 with update = 'on_step'"),
        ({"optimizer": {"clip_grad_value": 0}}, "key 'optimizer.clip_grad_value': expected greater than 0, got 0"),
        ({"security": {"tls_cert": "a.pem"}}, "key 'security': expected tls_cert and tls_key together"),
        ({"optimizer": {"lr": 0}}, "key 'optimizer.lr': expected greater than 0, got 0"),
        ({"experts": {}}, "key 'experts': expected at least one expert: a table [experts.NAME], or --expert ffn"),
        ({"experts": {"ffn.0": "ffn"}}, "key 'experts.ffn.0': expected a table, got 'ffn'"),
        ({"experts": {"ffn.0": {**FFN, "class": ""}}}, "key 'experts.ffn.0.class': expected a text that is not empty"),
        ({"experts": {"ffn.0": {"class_name": "ffn"}}}, "key 'experts.ffn.0.class_name': expected one of args"),
        ({"experts": {"memory": {**FFN, "memory": {"recompte": True}}}}, "Did you mean 'recompute'?"),
        ({"experts": {"memory": {**FFN, "evalonly": True}}}, "Did you mean 'eval_only'?"),
        ({"checkpoint_dir": 3}, "key 'checkpoint_dir': expected a path, got 3"),
        ({"checkpoint_dir": ""}, "key 'checkpoint_dir': expected a path, written out (of a name that begins"),
        ({"security": {"tokens_file": "~/tokens"}}, "(of a name that begins with '~': './~'), got '~/tokens'."),
        ({"offload": {"max_resident_bytes": 1, "store": ""}}, "key 'offload.store': expected a path, written out"),
        ({"security": {"insecure": "maybe"}}, "key 'security.insecure': expected true or false, got 'maybe'"),
        ({"optimizer": "adam"}, "expected a table such as { name = 'adam', lr = 1e-3 }, or 'none', got 'adam'"),
        ({"optimizer": 3}, "or 'none', got 3"),
        ({"experts": {"ffn.0": {}}}, "key 'experts.ffn.0.class': expected a value, got none"),
        ({"experts": {"ffn.0": {"class": "ffn", "arg": 1}}}, "key 'experts.ffn.0.arg': expected one of args, can_join"),
        ({"experts": {"../up": FFN}}, "expert name '../up': expected letters, digits"),
        ({"experts": {"ffn.[3:3]": FFN}}, "expert pattern 'ffn.[3:3]': expected 1 to 65536 names, got 0"),
        ({"experts": {"ffn.[0:999999999]": FFN}}, "got 999999999. A range is [start:stop], without its stop."),
        ({"experts": {"ffn.[0:70].[0:1000]": FFN}}, "got 70000"),
        ({"experts": 3}, "key 'experts': expected a table, got 3"),
    ],
)  # fmt: skip
def test_every_mistake_names_the_key_the_value_and_what_is_allowed(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked({**MINIMAL, **settings})
    assert text in str(refused.value)
    assert str(refused.value).startswith("flags, ")


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        checked({**MINIMAL, "update": "x", "seed": -1})
    assert len(str(refused.value).splitlines()) == 2


def test_what_is_wrong_within_an_optimizer_is_named_once() -> None:
    for settings in ({"optimizer": {"lr": "fast"}}, {"experts": {"e": {**FFN, "optimizer": {"lr": -1}}}}):
        with pytest.raises(ConfigError) as refused:
            checked({**MINIMAL, **settings})
        assert str(refused.value).count("\n") == 0, refused.value


# ---- where it comes from


def test_a_mistake_names_the_source_that_made_it(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'seed = -1\nupdate = "never"\n[experts.ffn]\nclass = 3\n[experts."ffn.1"]\nclass = "ffn"\n'
    )
    environment = {
        "EXPERTS_SERVER_UPDATE": "at noon",
        "EXPERTS_SERVER_LIMITS__MAX_THREADS": "0",
        "EXPERTS_SERVER_PORT": "tcp://10.0.0.1:31415",  # as Kubernetes gives for a service of this name
    }
    flags = {"seed": None, "latency_ms": -1.0, "experts": {"ffn.[1:3]": {"args": {"d_model": 8}, "x": 1}}}
    with pytest.raises(ConfigError) as refused:
        load_config(file, flags, environment)
    lines = sorted(line.partition(": expected")[0] for line in str(refused.value).splitlines())
    config = f"config {str(file)!r}"
    assert lines == sorted(
        [
            f"{config}, key 'seed'",
            f"{config}, key 'experts.ffn.class'",
            "environment variable EXPERTS_SERVER_UPDATE, key 'update'",
            "environment variable EXPERTS_SERVER_LIMITS__MAX_THREADS, key 'limits.max_threads'",
            "environment variable EXPERTS_SERVER_PORT, key 'port'",
            "flags, key 'latency_ms'",
            "flags, key 'experts.ffn.1.x'",
            "flags, key 'experts.ffn.2.class'",
        ]
    )


def test_what_nobody_says_is_missing_from_the_file_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.touch()
    for source, first in ((file, f"config {str(file)!r}, key 'experts'"), (None, "flags, key 'experts'")):
        with pytest.raises(ConfigError) as refused:
            load_config(source, {"experts": None}, {})
        assert str(refused.value).startswith(first)


def test_flags_win_over_an_expert_that_the_file_names_after_its_pattern(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        '[experts."ffn.[0:2]"]\nclass = "ffn"\nargs = { d_model = 4 }\n[experts."ffn.1"]\nargs = { d_model = 6 }\n'
    )
    flags = {"experts": {"ffn.[0:2]": {"class": "ffn", "args": {"d_model": 8, "d_ff": None}}}}
    config = load_config(file, flags, environment={})
    assert [expert.args for expert in config.experts.values()] == [{"d_model": 8}] * 2


def test_the_environment_can_say_all_that_a_file_can_in_any_order() -> None:
    variables = {
        "EXPERTS_SERVER_EXPERTS": '{ "e.[0:2]" = { class = "ffn", args = { d_model = 8 } } }',
        "EXPERTS_SERVER_OPTIMIZER": '{ name = "sgd", lr = 0.5 }',
        "EXPERTS_SERVER_OPTIMIZER__LR": "0.25",
        "EXPERTS_SERVER_OPTIMIZER__ARGS__MOMENTUM": "0.5",
        "EXPERTS_SERVER_OPTIMIZER__ARGS__NESTEROV": "true",
        "EXPERTS_SERVER_SECURITY__INSECURE": "true",
    }
    for order in (variables, dict(reversed(variables.items()))):
        config = load_config(environment=order)
        assert list(config.experts) == ["e.0", "e.1"]
        optimizer = config.optimizer_of(config.experts["e.0"])
        assert optimizer is not None
        assert (optimizer.name, optimizer.lr) == ("sgd", 0.25)
        assert optimizer.args == {"momentum": 0.5, "nesterov": True}
        assert config.security.insecure


def test_settings_of_no_optimizer_are_refused() -> None:
    """An expert that was not to be trained would be, by the default optimizer."""
    environment = {"EXPERTS_SERVER_OPTIMIZER": "none"}
    told = (
        r"key 'optimizer.name': expected an optimizer's name beside its settings \(for none: .*\), got 'none'"
    )
    for flags, more in (({"lr": 0.1}, {}), (None, {"EXPERTS_SERVER_OPTIMIZER__LR": "0.1"})):
        with pytest.raises(ConfigError, match=told):
            load_config(flags={**MINIMAL, "optimizer": flags}, environment={**environment, **more})
    named = load_config(flags={**MINIMAL, "optimizer": {"name": "sgd", "lr": 0.1}}, environment=environment)
    assert named.optimizer == OptimizerConfig(name="sgd", lr=0.1)
    experts = {"ffn.[0:2]": {**FFN, "optimizer": "none"}, "ffn.1": {"optimizer": {"lr": 0.1}}}
    with pytest.raises(ConfigError, match=r"key 'experts.ffn.1.optimizer.name'"):
        load_config(flags={"experts": experts}, environment={})


def test_a_variable_without_a_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^environment variable EXPERTS_SERVER_, key '': expected one of"):
        load_config(flags=MINIMAL, environment={"EXPERTS_SERVER_": "1"})


def test_a_variable_that_is_no_inline_table_is_refused() -> None:
    for text in ("none", "{ name = ", "{}\nlisten = 3"):
        environment = {"EXPERTS_SERVER_LIMITS": text}
        with pytest.raises(
            ConfigError, match=r"variable EXPERTS_SERVER_LIMITS, key .limits.: expected a table"
        ):
            load_config(flags=MINIMAL, environment=environment)


def test_an_embedded_server_listens_where_its_config_says_unless_it_is_told_otherwise() -> None:
    config = ServingConfig(listen="127.0.0.1:7", latency_ms=3)
    assert ExpertsServer({}, config=config).address == "127.0.0.1:7"
    assert ExpertsServer({}, config=config, listen="127.0.0.1:9").address == "127.0.0.1:9"
    assert ExpertsServer({}, config=ServingConfig(latency_ms=3)).address == "127.0.0.1:0"
    for wrong in ({"listen": "here"}, {"latency_ms": -1}):
        with pytest.raises(ConfigError, match=f"^server, key '{next(iter(wrong))}': expected .*, got .*[.]$"):
            ExpertsServer({}, **wrong)


def test_an_embedded_server_takes_the_keys_of_a_file_as_well() -> None:
    config = {"listen": "127.0.0.1:7", "memory": {"recompute": True}}
    assert ExpertsServer({}, config=config).address == "127.0.0.1:7"
    assert ExpertsServer({}, config=config, listen="127.0.0.1:9").address == "127.0.0.1:9"
    for wrong, mistake in (
        (
            {"checkpoint_dri": "a"},
            r"key 'checkpoint_dri': expected one of .* Did you mean 'checkpoint_dir'\?$",
        ),
        ({"memory": {"recompute": "if it helps"}}, "key 'memory.recompute': expected true or false, got .*"),
    ):
        with pytest.raises(ConfigError, match=f"^server, {mistake}"):
            ExpertsServer({}, config=wrong)
    with pytest.raises(TypeError, match="expected config to be a mapping of keys to values, got PosixPath"):
        ExpertsServer({}, config=Path("server.toml"))  # type: ignore[arg-type]


# ---- what is allowed


def test_loopback_needs_no_credentials_and_other_addresses_tls_and_callers_that_are_known() -> None:
    for address in ("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"):
        checked({**MINIMAL, "listen": address})
    tls = {"tls_cert": "a", "tls_key": "b"}
    for security in ({"insecure": True}, {**tls, "tokens_file": "c"}, {**tls, "client_ca": "c"}):
        checked({**MINIMAL, "listen": "0.0.0.0:1", "security": security})
    for security in ({}, tls, {"tokens_file": "c"}):
        with pytest.raises(ConfigError, match="expected a loopback address or credentials"):
            checked({**MINIMAL, "listen": "[::]:1", "security": security})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"listen = ", "expected TOML, got a file that does not parse (Invalid value (at end of document))"),
        (
            b"\xff\xfe",
            "expected TOML in UTF-8, got other bytes ('utf-8' codec can't decode byte 0xff in position 0",
        ),
        (None, "expected a readable file, got 'No such file or directory'"),
        (
            b"seed = " + b"9" * 5000,
            "expected TOML, got a file that does not parse (Exceeds the limit (4300 digits)",
        ),
        (
            b"[%ba]\n%ba = 1" % (b"a." * 900, b"a." * 900),  # newer Pythons take no key of more than 1000
            "expected tables a few deep, got one within another hundreds of times.",
        ),
        (
            b"seed = " + b"[" * 100_000,
            "expected TOML, got a file that does not parse (maximum recursion depth",
        ),
    ],
    ids=["cut short", "no UTF-8", "absent", "digits without end", "tables without end", "lists without end"],
)
def test_an_unreadable_file_is_named_with_the_reason(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    file = tmp_path / "server.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_config(file, environment={})
    assert str(file) in str(refused.value)
    assert text in str(refused.value)


def test_a_folder_as_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, environment={})


def test_the_model_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        checked(MINIMAL).seed = 3


# ---- names and addresses


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", ".a", "a.", "a..b", "a b", "a\n", "ä", "x" * 129]
)
def test_a_name_that_could_leave_a_folder_or_hide_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected letters"):
        check_name(name)


@pytest.mark.parametrize("pattern", ["ffn.[0-8]", "ffn.[0:8", "ffn.[0:8:2]"])
def test_a_range_written_otherwise_is_told_how(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"expected letters.*A range is \[start:stop\], as in 'ffn.\[0:8\]'"):
        expand_pattern(pattern)


def test_patterns_expand_in_order() -> None:
    assert expand_pattern("a") == ["a"]
    assert expand_pattern("l.[1:3].e.[9:11]") == ["l.1.e.9", "l.1.e.10", "l.2.e.9", "l.2.e.10"]


@pytest.mark.parametrize("address", ["", "a", ":1", "a:", "a:b", "::1:3", "a:-1", "a:1.5", "a/b:1", "[a]:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        split_address(address)
