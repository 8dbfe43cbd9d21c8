"""What a server hosts and how: one frozen, validated model, from a TOML file, the environment and flags.

Later sources win: defaults, then the file, then `EXPERTS_SERVER_<KEY>` variables (`__` between a table and its
key), then flags. Whatever is wrong raises `ConfigError` with one line a mistake, each naming the key, the value
and what is allowed. A file looks like this::

    listen = "127.0.0.1:31415"
    checkpoint_dir = "checkpoints"

    [optimizer]
    name = "adam"
    lr = 1e-3

    [experts."ffn.[0:32]"]                  # ffn.0 ... ffn.31
    class = "ffn"
    args = { d_model = 64 }

    [experts."ffn.3"]                       # a later entry overrides what an earlier one said of the same name
    optimizer = { name = "sgd", lr = 0.1 }
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from experts_server.names import check_name, expand_pattern
from experts_server.training import UpdateMode
from moe_autograd._toml import describe_unknown_key, read_toml
from moe_autograd.errors import ConfigError

ENVIRONMENT_PREFIX = "EXPERTS_SERVER_"
MIB = 1 << 20

ByteCount = Annotated[int, Field(gt=0, le=1 << 40)]
Count = Annotated[int, Field(gt=0, le=1 << 20)]
Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class ScheduleConfig(_Frozen):
    """A learning-rate schedule: a class of `torch.optim.lr_scheduler`, stepped once per update."""

    name: str
    args: dict[str, Any] = {}


class OptimizerConfig(_Frozen):
    """An optimizer for each expert: a class of `torch.optim` by name, in any case."""

    name: str = "adam"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    args: dict[str, Any] = {}
    clip_grad_value: Annotated[float, Field(gt=0)] | None = None
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    schedule: ScheduleConfig | None = None


class MemoryConfig(_Frozen):
    """How an expert trades memory, time and waiting."""

    recompute: bool = False
    split_backward: bool = False
    offload: bool = False
    prefetch: bool = True


SAVING_NOTHING = MemoryConfig()


class OffloadConfig(_Frozen):
    """What the offloaded experts of a server share: memory, and the place for what does not fit."""

    max_resident_bytes: ByteCount
    store: Literal["ram"] | Path = "ram"


class ExpertConfig(_Frozen):
    """One expert: its class, the class's arguments, and how it is trained."""

    class_name: str = Field(alias="class", min_length=1)
    args: dict[str, Any] = {}
    optimizer: OptimizerConfig | Literal["none"] | None = None
    update: UpdateMode | None = None
    samples_per_update: Count | None = None
    eval_only: bool = False
    can_join: bool = True
    memory: MemoryConfig = SAVING_NOTHING


class BatchingConfig(_Frozen):
    """How far calls of several clients for one expert are joined."""

    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
    max_wait_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0


class LimitsConfig(_Frozen):
    """What a client can make the server hold. There is no value for 'unlimited'."""

    max_tensor_bytes: ByteCount = 256 * MIB
    max_pass_bytes: ByteCount = 1024 * MIB
    max_calls_per_pass: Count = 16_384
    max_queued_calls: Count = 32_768
    max_queued_bytes: ByteCount = 2048 * MIB
    max_concurrent_passes: Count = 1024
    max_threads: Annotated[int, Field(ge=2, le=1024)] = 64
    kept_forward_bytes: ByteCount = 1024 * MIB
    kept_forward_s: Seconds = 300.0
    received_bytes: ByteCount = 2048 * MIB
    gathered_gradient_bytes: ByteCount = 4096 * MIB
    gathered_gradient_s: Seconds = 3600.0
    max_clients: Count = 4096
    ledger_reply_bytes: ByteCount = 256 * MIB


class SecurityConfig(_Frozen):
    """Who may call: TLS certificates, client certificates, bearer tokens."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    tokens_file: Path | None = None
    insecure: bool = False


class ServingConfig(_Frozen):
    """How a server serves, whatever it hosts."""

    listen: str = "127.0.0.1:31415"
    latency_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    drain_timeout_s: Seconds = 30.0
    checkpoint_dir: Path | None = None
    checkpoint_interval_s: Seconds = 300.0
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = 3
    metrics_listen: str | None = None
    batching: BatchingConfig = BatchingConfig()
    memory: MemoryConfig = SAVING_NOTHING
    offload: OffloadConfig | None = None
    limits: LimitsConfig = LimitsConfig()
    security: SecurityConfig = SecurityConfig()

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        """Away from loopback, callers have to show who they are, over a connection nobody can read."""
        security = self.security
        if (security.tls_cert is None) != (security.tls_key is None):
            raise ValueError("security: expected tls_cert and tls_key together, got one of them")
        if security.client_ca is not None and security.tls_cert is None:
            raise ValueError("security: expected tls_cert and tls_key with client_ca, got none")
        is_known = security.client_ca is not None or security.tokens_file is not None
        is_safe = security.tls_cert is not None and is_known
        if self.metrics_listen is not None and not is_loopback(self.metrics_listen) and not security.insecure:
            raise ValueError(
                f"metrics_listen: expected a loopback address, got {self.metrics_listen!r}. "
                "It asks nobody who he is: put a proxy before it, or use --insecure if the network is trusted"
            )
        if not is_loopback(self.listen) and not is_safe and not security.insecure:
            raise ValueError(
                f"listen: expected a loopback address or credentials, got {self.listen!r} without. Set "
                "security.tls_cert, tls_key and (tokens_file or client_ca); or --insecure if the network is trusted"
            )
        return self


class ServerConfig(ServingConfig):
    """Everything a server needs to know, checked; build it with `load_config`."""

    experts: dict[str, ExpertConfig] = Field(min_length=1)
    update: UpdateMode = "on_step"
    samples_per_update: Count | None = None
    optimizer: OptimizerConfig | Literal["none"] = Field(default_factory=OptimizerConfig)
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] = 0

    @field_validator("experts")
    @classmethod
    def _check_names(cls, experts: dict[str, ExpertConfig]) -> dict[str, ExpertConfig]:
        for name in experts:
            check_name(name)
        return experts

    @model_validator(mode="after")
    def _check_updates(self) -> Self:
        modes = [self.update, *(expert.update for expert in self.experts.values())]
        if self.samples_per_update is not None and "on_samples" not in modes:
            raise ValueError(
                f"samples_per_update: expected none with update = {self.update!r}, got {self.samples_per_update}. "
                "Set update = 'on_samples', or leave it out"
            )
        for name, expert in self.experts.items():
            update, samples = self.update_of(expert)
            if (update == "on_samples") != (samples is not None):
                raise ValueError(
                    f"experts.{name}.samples_per_update: expected a number of rows with update = 'on_samples' and none "
                    f"with another, got {samples} with update = {update!r}"
                )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        for name, expert in self.experts.items():
            mistake = memory_mistake(self.memory_of(expert), self.update_of(expert)[0], self.offload)
            if mistake is not None:
                raise ValueError(f"experts.{name}.memory.{mistake}")
        return self

    def memory_of(self, expert: ExpertConfig) -> MemoryConfig:
        """Return how one expert trades memory: what its entry says, and for the rest what is said for all."""
        return self.memory.model_copy(update=expert.memory.model_dump(exclude_unset=True))

    def update_of(self, expert: ExpertConfig) -> tuple[UpdateMode, int | None]:
        """Return when the optimizer of one expert steps, and after how many rows if it is `on_samples`."""
        update = expert.update or self.update
        samples = expert.samples_per_update
        if samples is None and update == "on_samples":
            samples = self.samples_per_update
        return update, samples

    def optimizer_of(self, expert: ExpertConfig) -> OptimizerConfig | None:
        """Return the optimizer of one expert, or `None` where it is not trained."""
        chosen = self.optimizer if expert.optimizer is None else expert.optimizer
        return None if chosen == "none" or expert.eval_only else chosen


def memory_mistake(memory: MemoryConfig, update: UpdateMode, offload: OffloadConfig | None) -> str | None:
    """Return `KEY: expected X, got Y` for choices that do not go together."""
    if memory.offload and offload is None:
        return "offload: expected a table [offload] with max_resident_bytes with offload = true, got none"
    if memory.offload and not memory.recompute:
        return (
            "recompute: expected true with offload = true, got false. A graph between forward and backward would keep "
            "the weights in memory"
        )
    if memory.split_backward and update != "on_step":
        return (
            f"split_backward: expected false with update = {update!r}, got true. A backward's answer says there that "
            "its gradients were applied"
        )
    return None


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; an IPv6 host stands in brackets.

    Raises:
        ValueError: if it is not an address, or the port is not within 0 to 65535.

    >>> split_address("[::1]:8080")
    ('::1', 8080)
    """
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdecimal() or (":" in host and not is_bracketed):
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:31415 or [::1]:0")
    if int(port) > 65535:
        raise ValueError("expected a port from 0 to 65535")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Read the file, then the environment, then the flags, and check the result.

    Args:
        file: a TOML file, or `None`.
        flags: a nested mapping shaped like the file; keys whose value is `None` are left out.
        environment: the process's own by default.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not allowed.
    """
    settings = read_toml(file) if file is not None else {}
    _merge(settings, _from_environment(os.environ if environment is None else environment))
    _merge(settings, flags or {})
    return check_config(settings, source=str(file) if file is not None else "flags and environment")


def check_config(settings: Mapping[str, Any], source: str = "settings") -> ServerConfig:
    """Turn plain settings into a `ServerConfig`, or raise `ConfigError` naming every mistake."""
    try:
        expanded = {**settings, "experts": _expand_experts(settings.get("experts", {}))}
        return ServerConfig.model_validate(expanded)
    except ValidationError as error:
        lines = [_describe(dict(mistake)) for mistake in error.errors()]
        raise ConfigError("\n".join(f"config {source!r}, {line}" for line in lines)) from error
    except ValueError as error:
        raise ConfigError(f"config {source!r}, {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            *tables, key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            table = settings
            for name in tables:
                table = table.setdefault(name, {})
            table[key] = value
    return settings


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        elif value is not None:
            base[key] = _without_none(value)


def _without_none(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}


def _expand_experts(experts: Any) -> Any:
    """Turn patterns into names; an entry for a name that is there already overrides key by key."""
    if not isinstance(experts, Mapping) or not all(isinstance(entry, Mapping) for entry in experts.values()):
        return experts  # the model says what is wrong with it
    expanded: dict[str, Any] = {}
    for pattern, entry in experts.items():
        for name in expand_pattern(pattern):
            _merge(expanded.setdefault(name, {}), entry)
    return expanded


def _describe(mistake: dict[str, Any]) -> str:
    """Write one of pydantic's mistakes as `key 'a.b': expected X, got Y.`"""
    location = tuple(part for part in mistake["loc"] if part not in ("OptimizerConfig", "literal['none']"))
    key = ".".join(str(part) for part in location)
    got = mistake["input"]
    match mistake["type"]:
        case "missing":
            return f"key {key!r}: expected a value, got none. Set it."
        case "extra_forbidden":
            return describe_unknown_key(key, got, _allowed_keys(location[:-1]))
        case "value_error" if not key:  # of the whole: the message begins with the key
            key, _, expected = str(mistake["ctx"]["error"]).partition(": ")
            return f"key {key!r}: {expected}."
        case "value_error":
            expected = str(mistake["ctx"]["error"])
        case "too_short" if key == "experts":
            expected = "expected at least one expert"
        case _:
            expected = str(mistake["msg"]).replace("Input should be", "expected")
    return f"key {key!r}: {expected}, got {got!r}."


def _allowed_keys(location: tuple[Any, ...]) -> list[str]:
    """The keys that the table at `location` has."""
    model: type[BaseModel] = ServerConfig
    for part in location:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        if field is not None:  # otherwise `part` is the name of an expert
            model = next((c for c in _models_in(field.annotation)), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(cast(Any, part))]
