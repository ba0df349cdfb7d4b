"""Several processes that train one model: FSDP2 over everything, each with its share of the rows."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from v41lib.model import Model
from v41lib.training.optim import Optimisers


def join_others() -> None:
    """Join the processes that ``torchrun`` started, if it did: gloo on CPUs, NCCL on GPUs, one process a GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shard(stepper: nn.Module) -> None:
    """Shard all that has a gradient. The experts' biases are small and moved by hand: every process has them whole."""
    fully_shard(stepper, ignored_params={p for p in stepper.parameters() if not p.requires_grad})


def mean(value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The mean over processes: FSDP averages gradients, so a loss divided by it adds up to the loss of all rows."""
    if place()[1] > 1:
        value = value.clone()
        dist.all_reduce(value)
        value = value / place()[1]
    return value


def total_loads(loads: dict[int, Int[Tensor, " E"]]) -> dict[int, Int[Tensor, " E"]]:
    """The tokens of each expert, over all processes."""
    if place()[1] > 1:
        for load in loads.values():
            dist.all_reduce(load)
    return loads


def local(state: Any) -> Any:
    """A nested state with each sharded tensor replaced by the part that is held here."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(local(value) for value in state)
    return state.to_local() if isinstance(state, DTensor) else state


@torch.no_grad()
def restore(model: Model, optimiser: Optimisers, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Put back what :func:`local` kept of the model's and the optimisers' state."""
    for name, weight in model.state_dict().items():
        (weight.to_local() if isinstance(weight, DTensor) else weight).copy_(weights[name])
    optimiser.load_state_dict(state)
    for member in optimiser.members:
        for parameter, values in member.state.items():
            if isinstance(parameter, DTensor):
                mesh, places, whole = parameter.device_mesh, parameter.placements, parameter.shape
                for name, value in values.items():
                    if isinstance(value, Tensor) and value.dim():
                        stride = parameter.stride()
                        values[name] = DTensor.from_local(value, mesh, places, shape=whole, stride=stride)


@torch.no_grad()
def whole(model: Model) -> dict[str, Tensor]:
    """Every parameter gathered, by name; all processes must call it."""
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
