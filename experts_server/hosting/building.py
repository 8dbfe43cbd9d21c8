"""Modules, optimizers and schedules from their names in the configuration.

Built-in expert classes are `ffn`, `swiglu`, `transformer` and `identity`; any other is `module:Class`, imported
and called with the entry's `args`. Optimizers and schedules are looked up in `torch.optim`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import lr_scheduler

from experts_server.configuration.config import ExpertConfig, OptimizerConfig, ScheduleConfig, UpdateMode
from experts_server.configuration.mistakes import did_you_mean
from experts_server.hosting.checks import (
    check_all_are_own,
    check_calls,
    check_hooks,
    check_parts,
    check_weights,
)
from experts_server.hosting.modules import IdentityExpert, TransformerExpert
from experts_server.hosting.training import Training
from moe_autograd._signatures import signature_of
from moe_autograd.errors import ConfigError
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "ffn": FeedForwardExpert,
    "swiglu": SwiGLUExpert,
    "transformer": TransformerExpert,
    "identity": IdentityExpert,
}

_CANNOT_STEP_ALONE: dict[Any, str] = {
    torch.optim.LBFGS: "wants a closure that computes the loss again",
    torch.optim.SparseAdam: "wants sparse gradients",
    lr_scheduler.ReduceLROnPlateau: "wants a metric at each step",
    lr_scheduler.LambdaLR: "wants a function, which a configuration cannot hold",
    lr_scheduler.MultiplicativeLR: "wants a function, which a configuration cannot hold",
    lr_scheduler.SequentialLR: "wants other schedules (OneCycleLR alone warms up and anneals)",
    lr_scheduler.ChainedScheduler: "wants other schedules",
}

_CANNOT_STEP_WITH = {
    "differentiable": "is for steps that autograd goes through",
    "capturable": "wants weights on a GPU",
}

_GIVEN = ("params", "lr", "optimizer")
# arguments of optimizers that choose an implementation
_IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}


def build_module(name: str, config: ExpertConfig, seed: int) -> nn.Module:
    """Return the module of one expert; the same seed and name give the same weights.

    Raises:
        ConfigError: the class does not exist, or does not take these arguments.
    """
    place = f"config, expert {name!r}"
    with torch.inference_mode(False):  # a file's own grad mode, inference mode and autocast end here
        make = _find_class(place, config.class_name)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + zlib.crc32(name.encode()))
        module = _call(f"{place}, key 'args'", make, _with_dtype(place, make, config.args), make)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{place}, key 'class': expected a torch.nn.Module, got {type(module).__name__} from {config.class_name!r}."
        )
    check_calls(f"{place}, key 'class'", module)
    check_weights(f"{place}, key 'args'", module)
    if config.eval_only:
        module.eval()
    elif not module.training:  # else which parts of it evaluate all the same is its own business
        module.train()
    return module


def build_training(
    name: str,
    module: nn.Module,
    config: OptimizerConfig | None,
    update: UpdateMode,
    samples_per_update: int | None = None,
) -> Training | None:
    """Return how the expert is trained; `None` if it is not, or has nothing to train.

    Raises:
        ConfigError: the optimizer or schedule does not exist, does not take these arguments, or cannot work here; or
            a part of the module is trained elsewhere, or a weight has a hook that would not run.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if config is not None:
        check_parts(f"config, expert {name!r}", module)
        check_hooks(f"config, expert {name!r}", module)
    if config is None or not parameters:
        return None
    place = f"config, expert {name!r}, key 'optimizer"
    make = _find_in(torch.optim, torch.optim.Optimizer, f"{place}.name'", config.name)
    _refuse(f"{place}.name'", make)

    def make_for(trained: Sequence[nn.Parameter]) -> Any:
        return _call(
            f"{place}.args'",
            lambda **args: make(trained, lr=config.lr, **_with_fastest(make, trained, args)),
            config.args,
            make,
        )

    optimizer = make_for(parameters)
    _refuse_options(place, optimizer)
    schedule = None
    if config.schedule is not None:
        schedule = _build_schedule(place, optimizer, config.schedule)
        _step_once(place, make_for([nn.Parameter(torch.zeros(1, 1))]), config.schedule)
    return Training(
        optimizer, update, samples_per_update or 1, schedule, config.clip_grad_value, config.clip_grad_norm
    )


def check_training(name: str, module: nn.Module, config: OptimizerConfig | None) -> None:
    """Raise `ConfigError` where `build_training` would, of an optimizer that an expert does not use, for a weight."""
    for weight in itertools.islice(module.parameters(), 1):
        build_training(name, nn.ParameterList([torch.zeros(1, 1, device=weight.device)]), config, "on_step")


def build_optimizer(
    name: str, module: nn.Module, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
) -> torch.optim.Optimizer | None:
    """Return what `make` makes of an expert's parameters; `None` without a maker or without anything to train.

    Raises:
        ConfigError: a part of the module is trained elsewhere, a weight has a hook that would not run, or the
            optimizer has weights that are not the module's.
    """
    if make is None:
        return None
    check_parts(f"expert {name!r}", module)
    check_hooks(f"expert {name!r}", module)
    wanted = [p for p in module.parameters() if p.requires_grad]
    made = make(wanted) if wanted else None
    check_all_are_own(f"expert {name!r}", module, made)
    return made


def why_it_cannot_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Return, in words that may follow its name, why each step of an optimizer would fail here; `None`: it may not."""
    for kind, why in _CANNOT_STEP_ALONE.items():
        if isinstance(optimizer, kind):
            return f"which {why}"
    option = _option_in_the_way(optimizer)
    return None if option is None else f"with {option!r}, which {_CANNOT_STEP_WITH[option]}"


def _with_fastest(
    make: Callable[..., Any], parameters: Sequence[nn.Parameter], args: dict[str, Any]
) -> dict[str, Any]:
    """Let torch's fused kernels make the steps where there are some, and nobody has chosen others.

    A step of Adam is three times as fast with them on a CPU, and the same to the rounding of one operation; weights of
    less than 32 bits are rounded less often. They know no strides, so weights that have unusual ones
    go without.
    """
    is_chosen = not _IMPLEMENTATIONS.isdisjoint(args)
    if is_chosen or "fused" not in signature_of(make).parameters:
        return args
    are_fit = all(
        (p.is_cpu or p.is_cuda) and p.is_contiguous() and p.dtype in (torch.float32, torch.float64)
        for p in parameters
    )
    return {**args, "fused": True} if are_fit else args


def _build_schedule(place: str, optimizer: torch.optim.Optimizer, config: ScheduleConfig) -> Any:
    make = _find_in(lr_scheduler, lr_scheduler.LRScheduler, f"{place}.schedule.name'", config.name)
    _refuse(f"{place}.schedule.name'", make)
    return _call(f"{place}.schedule.args'", lambda **args: make(optimizer, **args), config.args, make)


def _step_once(place: str, optimizer: Any, config: ScheduleConfig) -> None:
    """Step a schedule like it, for an optimizer of nothing: some take arguments with which no step can be made.

    The optimizer itself is not stepped: that loads torch's compiler, and what it raises is not the schedule's mistake.
    """
    schedule = _build_schedule(place, optimizer, config)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before")
            schedule.step()
    except Exception as error:
        raise ConfigError(
            f"{place}.schedule.args': expected arguments with which it can be stepped, got {config.args} "
            f"({_cause(error)})."
        ) from error


def _with_dtype(place: str, make: Callable[..., Any], args: dict[str, Any]) -> dict[str, Any]:
    """A file has no dtypes: of what is ours or torch's, a text is the name of one."""
    name, home = args.get("dtype"), getattr(make, "__module__", None) or ""
    if not isinstance(name, str) or not (make in BUILT_IN.values() or home.startswith("torch.")):
        return args
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"{place}, key 'args.dtype': expected the name of a torch.dtype, such as 'bfloat16', got {name!r}."
        )
    if make in BUILT_IN.values() and not dtype.is_floating_point:
        raise ConfigError(
            f"{place}, key 'args.dtype': expected a floating dtype, such as 'bfloat16', got {name!r}, which what is "
            "built in does not compute with."
        )
    return {**args, "dtype": dtype}


def _find_class(place: str, class_name: str) -> Callable[..., Any]:
    if class_name in BUILT_IN:
        return BUILT_IN[class_name]
    module_name, colon, attribute = class_name.partition(":")
    if not colon:
        package, dot, name = class_name.rpartition(".")
        advice = f" Did you mean '{package}:{name}'?" if dot else did_you_mean(class_name, BUILT_IN)
        raise ConfigError(
            f"{place}, key 'class': expected one of {', '.join(BUILT_IN)} or module:Class, got {class_name!r}.{advice}"
        )
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # whatever its module raises; a script reads its arguments
        package, dot, name = attribute.rpartition(".")
        advice = "Is its package installed, or its folder in PYTHONPATH?"
        raise ConfigError(
            f"{place}, key 'class': expected a class that can be imported, got {class_name!r} ({_cause(error)}). "
            + (f"Did you mean '{module_name}.{package}:{name}'?" if dot else advice)
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{place}, key 'class': expected a class, or a function that makes a module, got {class_name!r}, which is "
            f"of type {type(found).__name__}."
        )
    return cast(Callable[..., Any], found)


def _find_in(package: Any, base: type, place: str, name: str) -> Any:
    """Return the class of `package` whose name is `name`, in any case."""
    known = {
        key: value
        for key, value in vars(package).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value is not base
        and not key.startswith("_")
    }
    found = next((value for key, value in known.items() if key.lower() == name.lower()), None)
    if found is None:
        offered = sorted(key for key, value in known.items() if value not in _CANNOT_STEP_ALONE)
        raise ConfigError(
            f"{place}: expected one of {', '.join(offered)} (in any case), got {name!r}.{did_you_mean(name, offered)}"
        )
    return found


def _refuse(place: str, chosen: Any) -> None:
    if chosen in _CANNOT_STEP_ALONE:
        raise ConfigError(
            f"{place}: expected one that a server can step, got {chosen.__name__!r}, which "
            f"{_CANNOT_STEP_ALONE[chosen]}."
        )


def _refuse_options(place: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what torch takes here, and raises at in each step."""
    option = _option_in_the_way(optimizer)
    if option is not None:
        raise ConfigError(
            f"{place}.args': expected arguments with which a server can step, got {option!r}, which "
            f"{_CANNOT_STEP_WITH[option]}. Leave it out."
        )


def _option_in_the_way(optimizer: torch.optim.Optimizer) -> str | None:
    groups = optimizer.param_groups
    is_on_cpu = any(p.is_cpu for group in groups for p in group["params"])
    for key in _CANNOT_STEP_WITH:
        if any(group.get(key) for group in groups) and (is_on_cpu or key != "capturable"):
            return key
    return None


def _call(place: str, make: Callable[..., Any], args: dict[str, Any], chosen: Callable[..., Any]) -> Any:
    try:
        return make(**args)
    except (Exception, SystemExit) as error:  # whatever a user's class raises
        if not args and not isinstance(error, TypeError):  # none is missing, so none is to blame
            name = getattr(chosen, "__name__", repr(chosen))
            raise ConfigError(f"{place}: expected {name} to do without any, got {_cause(error)}.") from error
        raise ConfigError(
            f"{place}: expected {_arguments_of(chosen)}, got {args} ({_cause(error)}).{_missing(chosen, args)}"
        ) from error


def _missing(chosen: Callable[..., Any], args: dict[str, Any]) -> str:
    """Say which sizes a built-in class has to be given, also by flags."""
    if chosen not in BUILT_IN.values():
        return ""
    wanted = [p.name for p in signature_of(chosen).parameters.values() if p.default is p.empty]
    missing = [name for name in wanted if name not in args]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
    return f" Add {', '.join(missing)} (as flags: {flags})." if missing else ""


def _arguments_of(chosen: Callable[..., Any]) -> str:
    """Return which arguments can be configured: not those that are given by us."""
    try:
        names = [name for name in signature_of(chosen).parameters if name not in _GIVEN]
    except (TypeError, ValueError):  # no class, or one that does not tell
        return "arguments that it takes"
    return f"arguments that it takes ({', '.join(names)})" if names else "no arguments"


def _cause(error: BaseException) -> str:
    """Return what was raised, and where if it was not here."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    is_elsewhere = raised.filename != __file__ and not raised.filename.startswith("<frozen ")  # importlib's
    where = f", {raised.filename}:{raised.lineno}" if is_elsewhere else ""
    text = str(error).partition("\nException raised from ")[0]  # torch's frames of C++
    return f"{type(error).__name__}: {text}{where}"
