"""What a server hosts and how: one frozen, validated model. `settings` reads it from a file, the environment and flags.

What is checked here says what is expected; `mistakes` puts that into words that name the key and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from experts_server.configuration.names import check_name
from moe_autograd.wire.addresses import is_local, split_address

MIB = 1 << 20

# when an expert's optimizer steps; see `training`
UpdateMode = Literal["on_step", "on_backward", "on_samples"]
ByteCount = Annotated[int, Field(gt=0, le=1 << 40)]
Count = Annotated[int, Field(gt=0, le=1 << 20)]
Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]


def _check_finite(args: dict[str, Any]) -> dict[str, Any]:
    if not _is_finite(args):
        raise ValueError("expected numbers that are finite")
    return args


def _is_finite(value: object) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case Mapping():
            return all(map(_is_finite, value.values()))
        case list() | tuple():
            return all(map(_is_finite, value))
        case _:
            return True


FiniteArgs = Annotated[dict[str, Any], AfterValidator(_check_finite)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`clip_grad_norm = true` is meant to switch something on; pydantic takes it for 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = [
            get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(annotation)
        ]
        if isinstance(value, bool) and not {int, float}.isdisjoint([annotation, *kinds]):
            raise ValueError("expected a number")
        return value


class ScheduleConfig(_Frozen):
    """A learning-rate schedule: a class of `torch.optim.lr_scheduler`, stepped once per update."""

    name: str
    args: FiniteArgs = {}


class OptimizerConfig(_Frozen):
    """An optimizer for each expert: a class of `torch.optim` by name, in any case."""

    name: str = "adam"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    args: FiniteArgs = {}
    clip_grad_value: Annotated[float, Field(gt=0)] | None = None
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    schedule: ScheduleConfig | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "none":
            raise ValueError(
                "expected an optimizer's name beside its settings (for none: optimizer = 'none' alone)"
            )
        return name


TABLE, NONE = "<table>", "<none>"  # in the place of a mistake; no name that a user could give


def _kind_of_optimizer(value: Any) -> str | None:
    if isinstance(value, Mapping | OptimizerConfig):
        return TABLE
    return NONE if value == "none" else None


OptimizerChoice = Annotated[
    Annotated[OptimizerConfig, Tag(TABLE)] | Annotated[Literal["none"], Tag(NONE)],
    Discriminator(
        _kind_of_optimizer,
        custom_error_type="optimizer",
        custom_error_message="expected a table such as { name = 'adam', lr = 1e-3 }, or 'none'",
    ),
]


class MemoryConfig(_Frozen):
    """How an expert trades memory, time and waiting."""

    recompute: bool = False
    split_backward: bool = False
    offload: bool = False
    prefetch: bool = True


SAVING_NOTHING = MemoryConfig()


def _check_path(value: Any) -> Any:
    """Refuse what is a path to a shell alone: '' would be the folder where the server is started, and '~' one in it.

    And what is none to anybody.
    """
    text = str(value)
    if isinstance(value, str | Path) and (not text or text.startswith("~")):
        raise ValueError("expected a path, written out (of a name that begins with '~': './~')")
    if isinstance(value, str | Path) and "\0" in text:
        raise ValueError("expected a path, which has no null character")
    return value


def _check_store(value: Any) -> Any:
    if not isinstance(value, str | Path):
        raise ValueError("expected 'ram' or a path")
    return _check_path(value)


# Whole from the start: the file of an expert may change the folder that this process is in.
_WholePath = Annotated[Path, AfterValidator(Path.absolute)]
WrittenPath = Annotated[_WholePath, BeforeValidator(_check_path)]


class OffloadConfig(_Frozen):
    """What the offloaded experts of a server share: memory, and the place for what does not fit."""

    max_resident_bytes: ByteCount
    store: Annotated[Literal["ram"] | _WholePath, BeforeValidator(_check_store)] = "ram"


class ExpertConfig(_Frozen):
    """One expert: its class, the class's arguments, and how it is trained."""

    class_name: str = Field(alias="class", min_length=1)
    args: dict[str, Any] = {}
    optimizer: OptimizerChoice | None = None
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

    tls_cert: WrittenPath | None = None
    tls_key: WrittenPath | None = None
    client_ca: WrittenPath | None = None
    tokens_file: WrittenPath | None = None
    insecure: bool = False


class ServingConfig(_Frozen):
    """How a server serves, whatever it hosts."""

    listen: str = "127.0.0.1:31415"
    latency_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    drain_timeout_s: Seconds = 30.0
    checkpoint_dir: WrittenPath | None = None
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
        if self.metrics_listen is not None and not is_local(self.metrics_listen) and not security.insecure:
            raise ValueError(
                f"metrics_listen: expected a loopback address, got {self.metrics_listen!r}. "
                "It asks nobody who he is: put a proxy before it, or use --insecure if the network is trusted"
            )
        if self.metrics_listen == self.listen and split_address(self.listen)[1]:
            raise ValueError(
                f"metrics_listen: expected another port than that of listen, got {self.listen!r} for both. Choose one"
            )
        if not is_local(self.listen) and not is_safe and not security.insecure:
            raise ValueError(
                f"listen: expected a loopback address or credentials, got {self.listen!r} without. Set "
                "security.tls_cert, tls_key and (tokens_file or client_ca); or --insecure if the network is trusted"
            )
        return self


class ServerConfig(ServingConfig):
    """Everything a server needs to know, checked; build it with `settings.load_config`."""

    experts: dict[str, ExpertConfig] = Field(min_length=1)
    update: UpdateMode = "on_step"
    samples_per_update: Count | None = None
    optimizer: OptimizerChoice = Field(default_factory=OptimizerConfig)
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
                    f"with another, got {'none' if samples is None else samples} with update = {update!r}. "
                    f"{'Set it' if samples is None else 'Leave it out'}, or choose another update"
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
        return None if expert.eval_only else self.chosen_optimizer(expert)

    def chosen_optimizer(self, expert: ExpertConfig) -> OptimizerConfig | None:
        """Return the optimizer that is written down for one expert, whether it is trained or not; `None`: none is."""
        chosen = self.optimizer if expert.optimizer is None else expert.optimizer
        return None if chosen == "none" else chosen


def memory_mistake(memory: MemoryConfig, update: UpdateMode, offload: OffloadConfig | None) -> str | None:
    """Return `KEY: expected X, got Y` for choices that do not go together."""
    if memory.offload and offload is None:
        return "offload: expected a table [offload] that sets max_resident_bytes, got none. Add it"
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
