"""A server from its configuration: modules, their training, and what hosts them."""

from __future__ import annotations

from experts_server.configuration.config import ServerConfig
from experts_server.hosting.building import build_module, build_training, check_training
from experts_server.serving.server import ExpertServer, Hosting
from moe_autograd._ambient import contained


def check_buildable(config: ServerConfig) -> None:
    """Build all that `config` names, and let go of it; no file is written, also where a server runs with it.

    Raises:
        ConfigError: something cannot be built.
    """
    if config.offload is not None:
        in_memory = config.offload.model_copy(update={"store": "ram"})
        config = config.model_copy(update={"offload": in_memory})
    from_config(config).close()


def from_config(config: ServerConfig) -> ExpertServer:
    """Build the modules and optimizers of `config`, and the server that hosts them."""
    experts: dict[str, Hosting] = {}
    with contained():  # the files of experts run, on the thread that serves later
        for name, expert in config.experts.items():
            module = build_module(name, expert, config.seed)
            update, samples = config.update_of(expert)
            training = build_training(name, module, config.optimizer_of(expert), update, samples)
            if expert.eval_only:
                check_training(name, module, config.chosen_optimizer(expert))
            saving = config.memory_of(expert)
            experts[name] = Hosting(module, training, saving, expert.can_join, expert.eval_only)
    return ExpertServer(experts, config)
