"""Several processes that train one model: data parallel, started by `torchrun`.

Each process takes its share of every batch; gradients are averaged, so that n processes do what one would with n times
the batch. Without torchrun there is one process, and nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn


@dataclass(frozen=True)
class Processes:
    """How many processes train together, and which of them this one is."""

    count: int = 1
    rank: int = 0

    @property
    def is_first(self) -> bool:
        """The one that validates, saves and talks."""
        return self.rank == 0

    def share(self, model: nn.Module) -> nn.Module:
        """The model with its gradients averaged over the processes during backward."""
        return nn.parallel.DistributedDataParallel(model) if self.count > 1 else model

    def mean(self, value: Tensor) -> Tensor:
        """Mean of a tensor over the processes."""
        if self.count > 1:
            distributed.all_reduce(value)
            value /= self.count
        return value

    def wait(self) -> None:
        """Until all have come here."""
        if self.count > 1:
            distributed.barrier()


def this_process() -> Processes:
    """What torchrun told this process through its environment; one process without it."""
    return Processes(int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)))


@contextmanager
def together(device: torch.device) -> Iterator[Processes]:
    """Join the other processes for the length of a block."""
    processes = this_process()
    if processes.count == 1:
        yield processes
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield processes
    finally:
        distributed.destroy_process_group()


def own_device(device: torch.device) -> torch.device:
    """CUDA device of this process: torchrun numbers the processes of a machine."""
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device
