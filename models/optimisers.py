"""Optimisers and the learning-rate schedule: AdamW for everything, or Muon for the matrices inside the blocks.

Reference for Muon: Jordan et al. (2024), "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from models.config import Recipe
from models.gpt import GPT

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of the quintic in Jordan et al. (2024)


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then a cosine down to `final_fraction`."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.iterations - recipe.warmup)
    return recipe.final_fraction + (1 - recipe.final_fraction) * (1 + math.cos(math.pi * min(1.0, share))) / 2


def build_optimisers(gpt: GPT, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or AdamW beside Muon for the two-dimensional matrices inside the blocks.

    Weight decay is for matrices; norms and biases have none.
    """
    named = dict(gpt.named_parameters())
    inner = [p for name, p in named.items() if recipe.optimiser == "muon" and name.startswith("blocks.") and p.ndim == 2]
    taken = {id(p) for p in inner}
    rest = [p for p in named.values() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
    ]
    betas = (recipe.betas[0], recipe.betas[1])
    fused = rest[0].device.type in ("cpu", "cuda")
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([group for group in groups if group["params"]], lr=recipe.learning_rate, betas=betas, fused=fused)
    ]
    if inner:
        optimisers.append(Muon(inner, lr=recipe.muon_learning_rate, weight_decay=recipe.muon_weight_decay))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return optimisers


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made nearly orthogonal: every direction of a matrix moves by about the same.

    The same update as `torch.optim.Muon`. That one works matrix by matrix in bfloat16, which a CPU without units for it
    emulates; here all matrices of one shape are one batched product, in float32 on the CPU, five times as fast there.

    Args:
        params: two-dimensional parameters.
        lr: step size, times √(rows/columns) for a matrix that is taller than wide.
        weight_decay: decoupled, times lr.
        momentum: Nesterov's.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                updates = orthogonalise(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter.dtype), alpha=-rate)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum_buffer"], momentum)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Each matrix U S Vᵀ of a stack (matrix, rows, columns) brought near U Vᵀ by a few Newton–Schulz steps.

    Singular values end between about 0.7 and 1.2, except those that were near zero. A step multiplies X from the left by
    Q = a + b G + c G², where G = X Xᵀ. For long matrices in float32 the steps are taken on the small G alone, which goes
    to Q G Q, and X is multiplied by the product of the Q at the end: the same in exact arithmetic, and less of it.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.mT if tall else matrices
    X = X.bfloat16() if X.is_cuda else X
    X = X / X.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    a, b, c = NEWTON_SCHULZ
    if X.shape[2] >= 2 * X.shape[1] and not X.is_cuda:
        G, product = X @ X.mT, None
        for _ in range(steps):
            Q = torch.baddbmm(G, G, G, beta=b, alpha=c)
            Q.diagonal(dim1=1, dim2=2).add_(a)
            product = Q if product is None else Q @ product
            G = Q @ (G @ Q)
        X = X if product is None else product @ X
    else:
        for _ in range(steps):
            A = X @ X.mT
            B = torch.baddbmm(A, A, A, beta=b, alpha=c)
            X = torch.baddbmm(X, B, X, beta=a)
    return X.mT if tall else X
