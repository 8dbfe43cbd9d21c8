"""Models with remote experts in `torch.distributed.checkpoint`: in one process, and in two of a group."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from experts_server import ExpertsServer
from experts_server.command.cli import main
from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.ranks import end_rank
from tests.support.subprocesses import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_modules() -> dict[str, nn.Module]:
    """Return experts whose keys have one and several parts, and buffers of other dtypes."""
    torch.manual_seed(0)
    return {
        "ffn.0": nn.Linear(4, 4),
        "ffn.1": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    }


def make_model(experts) -> nn.Module:
    layer = MixtureOfExperts(TopKRouter(4, 2, top_k=1), experts)
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Sequential(nn.LayerNorm(4), experts["ffn.1"]))


@pytest.fixture
def modules():
    return make_modules()


@pytest.fixture
def model(modules):
    with ExpertsServer(modules) as server, connect(server.address) as experts:
        yield make_model(experts)


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def zeroed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Set all of a model's weights to zero; return what they were."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict({key: torch.zeros_like(value) for key, value in before.items()})
    return before


@pytest.mark.parametrize(
    "options",
    [
        None,
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
        StateDictOptions(full_state_dict=True),
    ],
    ids=["default", "full on the CPU", "without frozen ones", "full"],
)
def test_its_functions_get_and_set_what_state_dict_has(model, options):
    local = make_model(make_modules())
    local.load_state_dict(model.state_dict())
    got = get_model_state_dict(model, options=options)
    assert equal(got, get_model_state_dict(local, options=options))
    assert equal(got, model.state_dict())
    before = zeroed(model)
    set_model_state_dict(model, dict(before), options=options)
    assert equal(model.state_dict(), before)


def test_a_checkpoint_holds_the_model_as_one(model, tmp_path):
    optimizer = torch.optim.Adam(model.parameters())
    dcp.save({"model": model}, checkpoint_id=tmp_path / "model", no_dist=True)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "state": state}, checkpoint_id=tmp_path / "both", no_dist=True)
    before = zeroed(model)
    dcp.load({"model": model}, checkpoint_id=tmp_path / "model", no_dist=True)
    assert equal(model.state_dict(), before)
    zeroed(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "state": state}, checkpoint_id=tmp_path / "both", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert equal(model.state_dict(), before)


def test_what_is_saved_with_local_experts_is_loaded_into_remote_ones(model, tmp_path):
    local = make_model(make_modules())
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.normal_()
    dcp.save({"model": local}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"model": model}, checkpoint_id=tmp_path, no_dist=True)
    assert equal(model.state_dict(), local.state_dict())


def test_a_training_goes_on_from_an_earlier_generation_as_if_nothing_had_been(tmp_path):
    def serve() -> ExpertsServer:
        config = {"checkpoint_dir": str(tmp_path)}
        return ExpertsServer(make_modules(), optimizer=torch.optim.Adam, config=config)

    def train(experts) -> list[float]:
        model, there, losses = nn.Sequential(experts["ffn.0"], experts["ffn.1"]), RemoteOptimizer(experts), []
        torch.manual_seed(1)
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().sum()
            loss.backward()
            there.step(), there.zero_grad()
            losses.append(loss.item())
        return losses

    with serve() as server, connect(server.address) as experts:
        train(experts)
        saved = CliRunner().invoke(main, ["save", server.address]).stdout.strip()
        expected = train(experts)
        train(experts)
    later = [folder for folder in tmp_path.glob("generation-*") if folder.name > saved]
    assert later  # at its end the server has saved what came after
    for folder in later:
        shutil.rmtree(folder)
    with serve() as server, connect(server.address) as experts:
        assert train(experts) == expected


def test_an_expert_has_no_attributes_of_the_weights_that_are_elsewhere(model):
    expert = model[1].experts[0]
    assert not hasattr(expert, "weight")
    assert list(expert.parameters()) == list(expert.buffers()) == list(expert.children()) == []


def test_two_ranks_save_and_restore_as_one(modules, tmp_path):
    with ExpertsServer(modules) as server:
        program = (
            f"import sys; from {__name__} import in_a_group; in_a_group(int(sys.argv[1]), *sys.argv[2:])"
        )
        run_ranks(program, server.address, tmp_path)


def in_a_group(rank, address, folder):
    folder = Path(folder)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    with connect(address) as experts:
        torch.manual_seed(0)
        model = make_model(experts)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        before = get_model_state_dict(ddp)
        assert equal(before, model.state_dict())
        dcp.save({"model": model}, checkpoint_id=folder / "saved")

        @contextlib.contextmanager
        def restored():
            torch.distributed.barrier()
            if rank == 0:
                zeroed(model)
            torch.distributed.barrier()
            yield
            torch.distributed.barrier()
            assert equal(model.state_dict(), before)

        with restored():
            dcp.load({"model": model}, checkpoint_id=folder / "saved")
        with restored():
            set_model_state_dict(ddp.module, dict(before))
        with restored():
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            set_model_state_dict(model, dict(before) if rank == 0 else {}, options=options)
        with pytest.raises(RuntimeError, match=r'Missing key.*"module\.1\.experts\.0\.weight"'):
            set_model_state_dict(ddp, dict(before))
    end_rank()
