"""The demo's data, model and training step: handwritten digits, and a classifier with one mixture of experts."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from moe_autograd import MixtureOfExperts, Routing, TopKRouter
from moe_autograd.remote import RemoteExperts, RemoteOptimizer

D_MODEL = 64


def split_digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (1437, 64) in [0, 1], held-out ones (360, 64), and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=360, random_state=seed, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.from_numpy(array) for array in split)
    return train_x.float(), test_x.float(), train_y, test_y


class Classifier(nn.Module):
    """Embed, one residual mixture of experts, classify."""

    def __init__(self, experts: RemoteExperts) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(64, D_MODEL), nn.GELU(), nn.LayerNorm(D_MODEL), nn.Dropout(0.1))
        self.moe = MixtureOfExperts(TopKRouter(D_MODEL, len(experts), top_k=2), experts)
        self.classify = nn.Sequential(nn.LayerNorm(D_MODEL), nn.Dropout(0.1), nn.Linear(D_MODEL, 10))

    def forward(self, x: Tensor, *, one_after_the_other: bool = False) -> tuple[Tensor, Routing]:
        """Return logits (batch, 10) and the decision of the router."""
        if self.training:
            x = x + 0.15 * torch.randn_like(x)
        h = self.embed(x)
        y, routing = plain_loop(self.moe, h) if one_after_the_other else self.moe(h, return_routing=True)
        return self.classify(h + y), routing


def plain_loop(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Routing]:
    """Compute what `layer` computes, calling one expert after the other."""
    routing = layer.router(x)
    y = torch.zeros_like(x)
    for index, expert in enumerate(layer.experts):
        tokens, choice = (routing.expert_index == index).nonzero(as_tuple=True)
        if len(tokens):
            y = y.index_add(0, tokens, routing.combine_weights[tokens, choice, None] * expert(x[tokens]))
    return y, routing


class Trainer:
    """A classifier, an optimizer for what is here, and one for the experts, which are not."""

    def __init__(self, experts: RemoteExperts, num_steps: int) -> None:
        self.model = Classifier(experts)
        self.local = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.remote = RemoteOptimizer(experts)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.local, num_steps)
        self.num_steps = 0
        self.num_updates = 0  # of experts: one that got no token in a step has nothing to learn from it

    def step(self, x: Tensor, labels: Tensor, **options: bool) -> float:
        """Train on a batch; return its loss."""
        self.local.zero_grad()
        self.remote.zero_grad()
        logits, routing = self.model(x, **options)
        loss = F.cross_entropy(logits, labels) + 0.01 * routing.load_balancing_loss + 0.001 * routing.z_loss
        loss.backward()
        self.local.step()
        self.remote.step()
        self.schedule.step()
        self.num_steps += 1
        self.num_updates += int((routing.tokens_per_expert > 0).sum())
        return loss.item()

    def accuracy(self, x: Tensor, labels: Tensor) -> float:
        """Return the share of images that are read rightly."""
        self.model.eval()
        with torch.no_grad():
            logits, _ = self.model(x)
        self.model.train()
        return float((logits.argmax(-1) == labels).float().mean())
