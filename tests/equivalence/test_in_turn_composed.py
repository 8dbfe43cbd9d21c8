"""Small layers of torch that look up, attend or go through a sequence are the plain loop; others of them never are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch.utils._pytree import tree_leaves

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.reading import composed
from tests.support.comparison import one_after_another
from tests.support.made_in_turn import is_made_in_turn

pytestmark = pytest.mark.usefixtures("some_are_small")

NUM_CALLS = 3
D = 8

Make = Callable[[], nn.Module]


def places() -> tuple[Tensor, ...]:
    return (torch.randint(0, 10, (2, 5)),)


def sequence(copies: int = 1) -> tuple[Tensor, ...]:
    return (torch.randn(2, 5, D, requires_grad=True),) * copies


def two() -> tuple[Tensor, ...]:
    return *sequence(), *sequence()


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, 2, 16, **{"batch_first": True, "dropout": 0.0, **options})


def decoder_layer(**options: Any) -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(D, 2, 16, **{"batch_first": True, "dropout": 0.0, **options})


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(10, D), nn.LSTM(D, D, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(D, 2, batch_first=True), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        attended = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden + attended)  # type: ignore[no-any-return]


KINDS: list[tuple[Make, Callable[[], tuple[Tensor, ...]]]] = [
    (lambda: nn.Embedding(10, 4), places),
    (lambda: nn.Embedding(10, 4, padding_idx=2, scale_grad_by_freq=True), places),
    (lambda: nn.Embedding(10, 4, sparse=True), places),
    (lambda: nn.EmbeddingBag(10, 4, mode="max"), places),
    (lambda: nn.Sequential(nn.EmbeddingBag(10, D), nn.Linear(D, 4)), places),
    (lambda: nn.Sequential(nn.Embedding(10, D), nn.GELU(), encoder_layer()), places),
    (Language, places),
    (lambda: nn.Bilinear(D, D, 4), two),
    (lambda: nn.LSTM(D, 4), sequence),
    (lambda: nn.LSTM(D, 4, 2, bias=False, batch_first=True, bidirectional=True), sequence),
    (lambda: nn.GRU(D, 4, 2, batch_first=True), sequence),
    (lambda: nn.RNN(D, 4, nonlinearity="relu"), sequence),
    (lambda: nn.MultiheadAttention(D, 2, batch_first=True), lambda: sequence(3)),
    (lambda: nn.MultiheadAttention(D, 2, bias=False, add_zero_attn=True), lambda: sequence(3)),
    (encoder_layer, sequence),
    (lambda: encoder_layer(norm_first=True, activation=nn.GELU()), sequence),
    (lambda: encoder_layer(activation=F.gelu, bias=False), sequence),
    (decoder_layer, two),
    (lambda: nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(D)), sequence),
    (lambda: nn.TransformerDecoder(decoder_layer(), 2), two),
]


def tensors(returned: Any) -> list[Tensor]:
    return [one for one in tree_leaves(returned) if isinstance(one, Tensor)]


def second_order(results: list[Tensor], wanted: list[Tensor]) -> list[Any]:
    """Gradients of gradients; or what torch says where it has none."""
    try:
        total = sum(result.square().sum() for result in results)
        first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
        total = sum(one.square().sum() for one in first if one is not None and one.requires_grad)
        return [*torch.autograd.grad(total, wanted, allow_unused=True)]
    except RuntimeError as error:
        return [str(error)]


def program(modules: list[nn.Module], apply: Any, args: Any, *, has_second: bool = True) -> list[Any]:
    torch.manual_seed(1)
    results = tensors(apply(modules, args))
    inputs = [one for own in args for one in own if one.requires_grad]
    wanted = [*inputs, *nn.ModuleList(modules).parameters()]
    if not all(result.requires_grad for result in results):
        return results
    total = sum(result.square().sum() for result in results)
    first = torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)
    return [*results, *first, *(second_order(results, wanted) if has_second else []), torch.rand(2)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for mine, same in zip(found, expected, strict=True):
        if isinstance(mine, Tensor) and isinstance(same, Tensor):
            assert mine.is_sparse == same.is_sparse
            assert torch.equal(mine.to_dense(), same.to_dense())
        else:
            assert mine == same


@pytest.mark.parametrize(("make", "given"), KINDS)
@pytest.mark.parametrize("is_training", [True, False])
def test_small_ones_are_the_plain_loop(make: Make, given: Any, is_training: bool) -> None:
    modules, args = [make().train(is_training) for _ in range(NUM_CALLS)], [given() for _ in range(NUM_CALLS)]
    assert is_made_in_turn(modules[0], *args[0])
    assert_same(program(modules, parallel_apply, args), program(modules, one_after_another, args))
    mine, same = (tensors(apply(modules, args)) for apply in (parallel_apply, one_after_another))
    assert [type(one.grad_fn) for one in mine] == [type(one.grad_fn) for one in same]  # no node of ours
    with torch.no_grad():  # by other kernels, where torch has faster ones
        assert_same(tensors(parallel_apply(modules, args)), tensors(one_after_another(modules, args)))


@pytest.mark.parametrize(("make", "given"), KINDS)
def test_large_ones_get_a_thread(make: Make, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = make(), given()
    monkeypatch.setattr(in_turn, "most_small", lambda *_: 64)
    monkeypatch.setattr(in_turn, "least_large", lambda: 1 << 20)
    assert not is_made_in_turn(module, *args)


def test_how_much_work_they_are() -> None:
    most = in_turn.most_small() // composed.SHARE
    table = most // composed.WRITE // 64
    place = torch.zeros(1, dtype=torch.long)
    assert is_made_in_turn(nn.Embedding(table - 8, 64, device="meta").to_empty(device="cpu"), place)
    assert not is_made_in_turn(nn.Embedding(table + 1, 64, device="meta").to_empty(device="cpu"), place)
    sparse = nn.Embedding(table + 1, 64, sparse=True, device="meta").to_empty(device="cpu")
    assert is_made_in_turn(sparse, place)
    behind = nn.Sequential(nn.Embedding(10, 64, sparse=True), nn.Linear(64, 64, bias=False))
    assert is_made_in_turn(behind, place.expand(most // 64**2))
    # Each place is a row for the next layer.
    assert not is_made_in_turn(behind, place.expand(most // 64**2 + 1))
    attention, rows = nn.MultiheadAttention(D, 2, batch_first=True), torch.zeros(1, 1, D)
    num_tokens = int((most / (2 * D)) ** 0.5)
    assert is_made_in_turn(attention, *[rows.expand(1, num_tokens // 4, D)] * 3)
    assert not is_made_in_turn(attention, *[rows.expand(1, num_tokens, D)] * 3)  # each token with each
    assert is_made_in_turn(attention, *[rows.expand(num_tokens // 16, 8, D)] * 3)
    of_each_head = [rows.expand(1, int((most / 200) ** 0.5), D)] * 3  # its scores are more work than its rows
    assert is_made_in_turn(attention, *of_each_head)
    assert not is_made_in_turn(nn.MultiheadAttention(D, D, batch_first=True), *of_each_head)
    places = place.expand(1, most // 64 // composed.TAKE_MAX + 1)
    assert is_made_in_turn(nn.EmbeddingBag(10, 64, mode="sum"), places)
    assert not is_made_in_turn(nn.EmbeddingBag(10, 64, mode="max"), places)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: nn.LSTM(4, 4, batch_first=True), composed.MOST_STEPS),
        (lambda: nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True), composed.MOST_STEPS // 4),
        (lambda: nn.LSTM(4, 4, batch_first=True, proj_size=2), composed.MOST_STEPS // composed.SLOW),
        (lambda: nn.GRU(4, 4, batch_first=True), composed.MOST_STEPS // composed.SLOW),
        (lambda: nn.RNN(4, 4, 2, batch_first=True), composed.MOST_STEPS // composed.SLOW // 2),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_one_that_makes_many_steps_gets_a_thread(make: Make, most: int) -> None:
    """They keep one core busy, and no other."""
    module = make()
    for num_steps, is_short in ((most, True), (most + 1, False)):
        assert is_made_in_turn(module, torch.randn(2, num_steps, 4)) is is_short
    places = torch.zeros(2, most + 1, dtype=torch.long)
    assert not is_made_in_turn(nn.Sequential(nn.Embedding(10, 4), module), places)


DRAWING: list[tuple[Make, Callable[[], tuple[Tensor, ...]]]] = [
    (lambda: nn.LSTM(D, 4, 2, dropout=0.5), sequence),
    (lambda: nn.GRU(D, 4, 2, dropout=0.5), sequence),
    (lambda: nn.MultiheadAttention(D, 2, dropout=0.5, batch_first=True), lambda: sequence(3)),
    (lambda: encoder_layer(dropout=0.5), sequence),
    (lambda: decoder_layer(dropout=0.5), two),
]


def on_threads(modules: Any, args: Any) -> Any:
    return parallel_apply([module.__call__ for module in modules], args)


@pytest.mark.parametrize(("make", "given"), DRAWING)
def test_dropouts_draw_what_they_draw_on_threads(make: Make, given: Any) -> None:
    modules, args = [make() for _ in range(NUM_CALLS)], [given() for _ in range(NUM_CALLS)]
    assert is_made_in_turn(modules[0], *args[0])
    first = program(modules, parallel_apply, args, has_second=False)
    assert_same(first, program(modules, parallel_apply, args, has_second=False))
    for mine, same in zip(first, program(modules, on_threads, args, has_second=False), strict=True):
        torch.testing.assert_close(mine, same)  # there with other intra-op threads
    for module in modules:
        module.eval()
    assert_same(program(modules, parallel_apply, args), program(modules, one_after_another, args))


@pytest.mark.parametrize(("make", "given"), [KINDS[8], KINDS[12], KINDS[14], *DRAWING])
def test_recomputed_they_have_the_same_gradients(make: Make, given: Any) -> None:
    modules, args = [make() for _ in range(NUM_CALLS)], [given() for _ in range(NUM_CALLS)]

    def recomputed(modules: Any, args: Any) -> Any:
        return parallel_apply(modules, args, recompute=True)

    both = [program(modules, apply, args, has_second=False) for apply in (recomputed, parallel_apply)]
    for mine, same in zip(*both, strict=True):
        torch.testing.assert_close(mine, same)


class Prints(nn.LSTM):
    def forward(self, x: Tensor, hx: Any = None) -> Any:
        print(end="")
        return super().forward(x, hx)


class Special(Tensor):
    pass


def changed(make: Make, change: Callable[[Any], object]) -> Make:
    def changed_module() -> nn.Module:
        module = make()
        change(module)
        return module

    return changed_module


def weight_by_hand(module: Any) -> None:
    weight = module.weight_hh_l0.detach()
    del module.weight_hh_l0
    module.weight_hh_l0 = weight


def lstm() -> nn.Module:
    return nn.LSTM(D, 4)


def attention() -> nn.Module:
    return nn.MultiheadAttention(D, 2, batch_first=True)


class OutProjection(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: nn.Embedding(10, 4, max_norm=1.0), places),
        (lambda: nn.EmbeddingBag(10, 4, max_norm=1.0), places),
        (lambda: Prints(D, 4), sequence),
        (changed(lstm, weight_by_hand), sequence),
        (
            changed(lstm, lambda m: m._flat_weights.__setitem__(0, m.weight_ih_l0.as_subclass(Special))),
            sequence,
        ),
        (changed(lstm, lambda m: setattr(m, "check_forward_args", print)), sequence),
        (changed(lstm, lambda m: m.register_forward_hook(lambda *_: None)), sequence),
        (lambda: parametrizations.weight_norm(nn.LSTM(D, 4), "weight_hh_l0"), sequence),
        (lambda: nn.MultiheadAttention(D, 2, add_bias_kv=True, batch_first=True), lambda: sequence(3)),
        (changed(attention, lambda m: setattr(m, "out_proj", OutProjection(D, D))), lambda: sequence(3)),
        (changed(attention, lambda m: setattr(m, "bias_k", torch.ones(1, 1, D))), lambda: sequence(3)),
        (changed(attention, lambda m: setattr(m, "merge_masks", print)), lambda: sequence(3)),
        (lambda: encoder_layer(activation=lambda x: x), sequence),
        (lambda: encoder_layer(activation=nn.ReLU(inplace=True)), sequence),
        (changed(encoder_layer, lambda m: setattr(m, "norm1", nn.Identity())), sequence),
        (changed(encoder_layer, lambda m: setattr(m, "_ff_block", lambda x: x)), sequence),
        (changed(encoder_layer, lambda m: m.self_attn.register_forward_hook(lambda *_: None)), sequence),
        (
            changed(lambda: nn.TransformerEncoder(encoder_layer(), 1), lambda m: m.layers.append(nn.Tanh())),
            sequence,
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 20)), nn.Conv1d(2, 8, 1), lstm()), sequence),
    ],
)
def test_what_may_do_more_than_compute_gets_a_thread(make: Make, given: Any) -> None:
    assert not is_made_in_turn(make(), *given())


def test_packed_sequences_get_a_thread() -> None:
    packed = rnn.pack_sequence([torch.randn(3, D), torch.randn(2, D)])
    module = nn.LSTM(D, 4)
    assert not is_made_in_turn(module, packed)
    (mine, _), same = parallel_apply([module], [(packed,)])[0], module(packed)[0]
    assert torch.equal(mine.data, same.data)


@pytest.mark.parametrize(
    ("make", "given", "owner", "name"),
    [
        (lambda: nn.Embedding(10, 4), places, F, "embedding"),
        (attention, lambda: sequence(3), F, "multi_head_attention_forward"),
        (attention, lambda: sequence(3), F, "softmax"),
        (encoder_layer, sequence, F, "scaled_dot_product_attention"),
        (encoder_layer, sequence, nn.TransformerEncoderLayer, "_sa_block"),
        (lstm, sequence, nn.RNNBase, "_update_flat_weights"),
        (lambda: nn.GRU(D, 4), sequence, torch, "zeros"),
    ],
)
def test_where_somebody_has_replaced_what_they_call_they_get_a_thread(
    make: Make, given: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, args, before = make(), given(), getattr(owner, name)
    assert is_made_in_turn(module, *args)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: before(*args, **kwargs))
    assert not is_made_in_turn(module, *args)


def test_they_are_too_slow_to_be_small_for_a_server() -> None:
    assert not in_turn.is_small(encoder_layer(), [torch.randn(1, 1, D)])
    assert not in_turn.is_small(lstm(), [torch.randn(1, 1, D)])


def test_experts_that_are_layers_of_a_transformer_are_called_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    experts = [nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0) for _ in range(4)]
    layer, x = MixtureOfExperts(TopKRouter(D, 4, top_k=2), experts), torch.randn(12, D, requires_grad=True)
    wanted = [x, *layer.parameters()]
    mine = layer(x)
    gradients = torch.autograd.grad(mine.square().sum(), wanted)
    assert "Join" not in names_of_nodes(mine)
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    same = copy.deepcopy(layer)(x)
    assert "Join" in names_of_nodes(same)
    torch.testing.assert_close(mine, same)
    same = layer(x)
    for gradient, expected in zip(gradients, torch.autograd.grad(same.square().sum(), wanted), strict=True):
        torch.testing.assert_close(gradient, expected)


def names_of_nodes(y: Tensor) -> str:
    nodes, seen = [y.grad_fn], set[Any]()
    for node in nodes:
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [one for one, _ in node.next_functions]
    return " ".join(sorted(type(node).__name__ for node in seen))
