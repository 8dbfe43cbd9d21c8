"""The command line. stdout is for what was asked for; the log goes to stderr."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

from experts_server.command import console
from experts_server.command.daemon import run
from experts_server.command.logs import flush_log, silence_grpc, start_logging
from experts_server.command.stdout import fill_closed_descriptors, to_stdout
from experts_server.command.top import watch
from experts_server.configuration.config import OptimizerConfig, ServerConfig, UpdateMode
from experts_server.configuration.names import MAX_NAMES_PER_PATTERN, counted
from experts_server.configuration.settings import load_config
from experts_server.serving.certificates import check_credentials
from experts_server.serving.configured import check_buildable
from moe_autograd._contexts import contextmanager
from moe_autograd.errors import ConfigError, MoeAutogradError, RemoteError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.addresses import is_host_and_port
from moe_autograd.wire.options import LONGEST_S

# It is we who say of a file that it cannot be read.
_FILE = click.Path(path_type=Path, readable=False)


def _connection_options(timeout_s: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add what every command that talks to a server takes.

    Args:
        timeout_s: how long it waits for the answer by default.
    """
    options = (
        click.option(
            "--timeout-s",
            type=float,
            default=timeout_s,
            show_default=True,
            callback=_check_timeout,
            help="How many seconds to wait for the answer.",
        ),
        click.option("--key", type=_FILE, help="The private key of --cert."),
        click.option("--cert", type=_FILE, help="Your own certificate, for a server with client_ca."),
        click.option("--ca", type=_FILE, help="Who signed the server's certificate; turns TLS on."),
        click.option("--token-file", type=_FILE, help="A file that holds the bearer token."),
    )

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for option in options:
            function = option(function)
        return function

    return add


def _check_address(ctx: click.Context, parameter: click.Parameter, given: str | tuple[str, ...]) -> Any:
    for address in (given,) if isinstance(given, str) else given:
        if not is_host_and_port(address):
            raise ConfigError(
                f"address: expected HOST:PORT, such as 127.0.0.1:31415 or [::1]:31415, got {address!r}. Take what the "
                "server's log names."
            )
    return given


def _check_metrics_address(ctx: click.Context, parameter: click.Parameter, given: str) -> Any:
    return _check_address(ctx, parameter, given.removeprefix("http://").removesuffix("/metrics"))


def _check_timeout(ctx: click.Context, parameter: click.Parameter, timeout_s: float) -> float:
    if not 0 < timeout_s <= LONGEST_S:  # for "nan" a range of click's has room
        raise click.BadParameter(f"{timeout_s} is not in the range 0<x<={LONGEST_S:.0e}.")
    return timeout_s


def _check_interval(ctx: click.Context, parameter: click.Parameter, interval_s: float) -> float:
    if not 0.1 <= interval_s <= LONGEST_S:
        raise click.BadParameter(f"{interval_s} is not in the range 0.1<=x<={LONGEST_S:.0e}.")
    return interval_s


def _default(model: type[BaseModel], key: str) -> str:
    return f"  [default: {model.model_fields[key].default}]"


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Show an error of ours as one line and exit 1."""
    try:
        yield
    except MoeAutogradError as error:
        raise click.ClickException(str(error)) from error


class _Command(click.Command):
    """Makes its context, in which `--help` prints, where stdout may take nothing."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with to_stdout():
            return super().make_context(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Tell who gives a file without its option which one that is."""
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            options = [name for one in self.params for name in one.opts if name in ("--config", "--check")]
            files = [one for one in given if one.endswith(".toml")]
            if not files or not options or options[0] in given:
                raise
            advice = f"Did you mean {options[0]} {files[0]}?"
            raise click.UsageError(f"{error.format_message()} {advice}", ctx) from error


class _Group(click.Group):
    """Shows an error of ours as one line and exits 1."""

    command_class = _Command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _in_one_line(), to_stdout():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _in_one_line():
            return super().invoke(ctx)


@click.group(cls=_Group)
@click.version_option(package_name="moe-autograd")
def main() -> None:
    """Host experts, and look at servers that do."""
    fill_closed_descriptors()
    silence_grpc()


@main.command()
@click.option("--config", "file", type=_FILE, help="A TOML file; variables and flags win.")
@click.option(
    "--listen", metavar="HOST:PORT", help="Port 0 takes a free one." + _default(ServerConfig, "listen")
)
@click.option(
    "--expert", "expert_class", metavar="CLASS", help="ffn, swiglu, transformer, identity or module:Class."
)
@click.option(
    "--num-experts",
    type=click.IntRange(1, MAX_NAMES_PER_PATTERN),
    help="How many of --expert: CLASS.0, CLASS.1, ...  [default: 1]",
)
@click.option(
    "--d-model", type=click.IntRange(1), help="The experts' width; ffn, swiglu and transformer want it."
)
@click.option(
    "--d-ff",
    type=click.IntRange(1),
    help="The experts' inner width; swiglu wants it, of ffn and transformer it is 4 * d_model by default.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="A class of torch.optim, in any case; 'none': not trained." + _default(OptimizerConfig, "name"),
)
@click.option("--lr", type=float, help="The optimizer's learning rate." + _default(OptimizerConfig, "lr"))
@click.option(
    "--update",
    type=click.Choice(get_args(UpdateMode)),
    help="When an expert is updated." + _default(ServerConfig, "update"),
)
@click.option(
    "--samples-per-update",
    type=click.IntRange(1),
    help="After so many rows of one client, with --update on_samples.",
)
@click.option("--seed", type=int, help="Decides the experts' first weights." + _default(ServerConfig, "seed"))
@click.option("--latency-ms", type=float, help="A delay added to every message of calls, for demonstrations.")
@click.option(
    "--checkpoint-dir",
    type=click.Path(readable=False),
    help="Where checkpoints are kept; nowhere by default.",
)
@click.option("--metrics-listen", metavar="HOST:PORT", help="Where /metrics is served; nowhere by default.")
@click.option(
    "--drain-timeout-s",
    type=float,
    help="How long a stop waits for calls in flight." + _default(ServerConfig, "drain_timeout_s"),
)
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond loopback without credentials.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged: this and worse.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How the log on stderr is written.",
)
def serve(file: Path | None, log_level: str, log_format: str, **flags: Any) -> None:
    """Host experts until SIGTERM, Ctrl-C or the end of the terminal.

    Once it serves, it prints one line to stdout: "experts-server: serving N experts at HOST:PORT". The first
    signal drains, saves and exits 0 (1 if it could not save); the second one exits at once.

    What to host stands in a file, in variables EXPERTS_SERVER_<KEY> or in flags; later ones win. Flags are the most
    used keys; docs/server.md has all.
    """
    config = load_config(file, _settings_of(flags))
    start_logging(log_level, as_json=log_format == "json")
    try:
        status = asyncio.run(run(config))
    finally:
        flush_log()
    sys.exit(status)


@main.command()
@click.argument("addresses", metavar="HOST:PORT...", nargs=-1, required=True, callback=_check_address)
@click.option(
    "--json", "as_json", is_flag=True, help="For programs: an object, or a list of them for several servers."
)
@_connection_options(60.0)
def info(addresses: tuple[str, ...], as_json: bool, **connection: Any) -> None:
    """Show what the servers at these addresses host.

    A server that does not answer is reported on stderr, after the others, and makes the exit status 1.
    """
    replies: list[tuple[str, pb.InfoReply]] = []
    errors: list[RemoteError] = []
    for address in addresses:
        try:
            replies.append((address, console.ask_info(address, **connection)))
        except RemoteError as error:
            errors.append(error)
    with to_stdout():
        if as_json and (replies or len(addresses) > 1):
            found = [console.as_plain(address, reply) for address, reply in replies]
            click.echo(json.dumps(found if len(addresses) > 1 else found[0], indent=2))
        elif not as_json:
            for address, reply in replies:
                console.print_table(address, reply)
    for earlier in errors[:-1]:
        click.echo(f"Error: {earlier}", err=True)
    if errors:
        raise errors[-1]


@main.command()
@click.argument("address", metavar="METRICS_HOST:PORT", callback=_check_metrics_address)
@click.option(
    "--interval-s",
    type=float,
    default=2.0,
    show_default=True,
    callback=_check_interval,
    help="Seconds from one look to the next.",
)
@click.option("--looks", type=click.IntRange(1), help="Stop after so many; without it, at Ctrl-C.")
def top(address: str, interval_s: float, looks: int | None) -> None:
    """Watch load, latency and updates of each expert.

    METRICS_HOST:PORT is what the server was started with as --metrics-listen; the address that its log names will do as
    well. While the server is away, top says so, and goes on when it is back.
    """
    with to_stdout():
        watch(address, interval_s, looks)


@main.command("config")
@click.option("--check", "files", required=True, multiple=True, type=_FILE, help="A TOML file to check.")
def check(files: tuple[Path, ...]) -> None:
    """Check a configuration without serving it; of several, each as if it were alone.

    Keys, values, classes and their arguments, certificates and tokens. A file with mistakes is reported on stderr,
    after the others, and makes the exit status 1.
    """
    mistaken: list[str] = []
    for file in files:
        try:
            config = load_config(file)
            check_buildable(config)
            check_credentials(config.security)
        except MoeAutogradError as error:
            mistaken.append(f"{file}: {error}")
            continue
        with to_stdout():
            click.echo(f"{file}: {counted(len(config.experts))}, no mistakes")
    for earlier in mistaken[:-1]:
        click.echo(f"Error: {earlier}", err=True)
    if mistaken:
        raise ConfigError(mistaken[-1])


@main.command()
@click.argument("address", metavar="HOST:PORT", callback=_check_address)
@_connection_options(600.0)
def save(address: str, **connection: Any) -> None:
    """Let the server at HOST:PORT write a checkpoint.

    Prints the name of the checkpoint when it is safe on the disk.
    """
    saved = console.ask_save(address, **connection)
    with to_stdout():
        click.echo(saved)


@main.command("export")
@click.argument("address", metavar="HOST:PORT", callback=_check_address)
@click.argument("expert")
@click.argument("file")
@_connection_options(60.0)
def export_weights(address: str, expert: str, file: str, **connection: Any) -> None:
    """Write the weights of EXPERT to FILE, or to stdout for "-".

    FILE is plain safetensors, with the keys of the expert's state_dict.
    """
    console.export_weights(address, expert, file, **connection)


@main.command("import")
@click.argument("address", metavar="HOST:PORT", callback=_check_address)
@click.argument("expert")
@click.argument("file")
@_connection_options(60.0)
def import_weights(address: str, expert: str, file: str, **connection: Any) -> None:
    """Set the weights of EXPERT to those in FILE, or from stdin for "-".

    FILE is plain safetensors, with the keys of the expert's state_dict. The optimizer's state stays as it is.
    """
    console.import_weights(address, expert, file, **connection)


def _settings_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Give flags the shape that the configuration file has."""
    experts, optimizer = _expert_flags(flags), _optimizer_flags(flags)
    is_insecure = flags.pop("insecure")
    security = {"insecure": is_insecure} if is_insecure else None  # a table would cover whatever is no table
    return {**flags, "experts": experts, "optimizer": optimizer, "security": security}


def _expert_flags(flags: dict[str, Any]) -> dict[str, Any] | None:
    class_name, count = flags.pop("expert_class"), flags.pop("num_experts")
    args = {"d_model": flags.pop("d_model"), "d_ff": flags.pop("d_ff")}
    if class_name is None:
        if count is not None or any(value is not None for value in args.values()):
            raise click.UsageError(
                "--num-experts, --d-model and --d-ff: expected --expert with them. Add it."
            )
        return None
    name = class_name.rpartition(":")[2]
    if not name:
        raise click.UsageError(f"--expert: expected the name of a class, got {class_name!r}. Give one.")
    return {f"{name}.[0:{count or 1}]": {"class": class_name, "args": args}}


def _optimizer_flags(flags: dict[str, Any]) -> Any:
    name, lr = flags.pop("optimizer"), flags.pop("lr")
    if name == "none":
        if lr is not None:
            raise click.UsageError(
                f"--lr: expected none with --optimizer none, got {lr}. Leave one of them out."
            )
        return "none"
    return {"name": name, "lr": lr} if name is not None or lr is not None else None
