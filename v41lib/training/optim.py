"""The optimisers: orthogonalised momentum for matrices, balanced momentum for token tables, AdamW for the rest.

All three take steps of about the size of an AdamW step, so their learning rates compare (report section 2.5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from v41lib.model import Model

Group = Literal["queries", "hidden", "embedding", "head", "indexer", "small"]

# The quintic of Jordan et al. 2024: steep at zero, and within about [0.7, 1.2] after five steps.
QUINTIC = (3.4445, -4.7750, 2.0315)

# The RMS of a typical AdamW step at learning rate 1 (Liu et al. 2025).
ADAMW_RMS = 0.2

# How many elements a CPU orthogonalises at once (1 MiB of FP32): more would leave its cache between the products.
CACHED_ELEMENTS = 1 << 18


def orthogonalise(matrices: Float[Tensor, "... M N"], steps: int = 5) -> Float[Tensor, "... M N"]:
    """Move every singular value of each matrix towards one by Newton-Schulz steps, in FP32; zeros stay zeros.

    Only products are needed, of the smaller side. The values end near one, not at it, which training does not mind
    (Jordan et al. 2024).
    """
    *leading, rows, columns = matrices.shape
    flat = matrices.reshape(-1, rows, columns).float()
    at_once = max(CACHED_ELEMENTS // (rows * columns), 1) if flat.device.type == "cpu" else max(len(flat), 1)
    done = torch.cat([_newton_schulz(piece, steps) for piece in flat.split(at_once)])
    return done.reshape(*leading, rows, columns).to(matrices.dtype)


def _newton_schulz(x: Float[Tensor, "B M N"], steps: int) -> Float[Tensor, "B M N"]:
    a, b, c = QUINTIC
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    # The Frobenius norm bounds the largest singular value, above which the quintic would diverge.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def balance(matrix: Float[Tensor, "V M"], iterations: int = 5) -> Float[Tensor, "V M"]:
    """Divide rows, then columns, by their RMS, ``iterations`` times, in FP32, until both are near one.

    A column's RMS is over the rows that are not zero; rows and columns of zeros stay zeros. The result does not
    depend on the scale of ``matrix`` (report section 2.5, after Sinkhorn and Knopp 1967).
    """
    x = matrix.float()
    # Squares of small gradients would underflow.
    x = x / x.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    rows = x.any(-1, keepdim=True).sum().clamp_min(1)
    for _ in range(iterations):
        x.div_(_nonzero(torch.linalg.vector_norm(x, dim=-1, keepdim=True) * x.shape[-1] ** -0.5))
        x.div_(_nonzero(torch.linalg.vector_norm(x, dim=0, keepdim=True) * rows.rsqrt()))
    return x.to(matrix.dtype)


def _nonzero(divisor: Tensor) -> Tensor:
    return torch.where(divisor > 0, divisor, 1.0)


class _Whole(Optimizer):
    """An optimiser whose update of a parameter needs the whole matrix, also where FSDP2 has sharded it.

    Momentum stays sharded; what is gathered is one direction at a time.
    """

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum

    def _apply(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        """Decay the parameter, then subtract ``lr * update``, of which a sharded parameter takes its own part."""
        if isinstance(parameter, DTensor):
            if not _by_matrix(parameter):
                # Every process has computed the same update: none has to be sent one.
                mesh, places = parameter.device_mesh, parameter.placements
                update = distribute_tensor(update, mesh, places, src_data_rank=None).to_local()
            parameter = parameter.to_local()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


def _by_matrix(tensor: DTensor) -> bool:
    """Whether every process holds whole matrices of a stack, or all of it, so that nothing need be gathered."""
    return tensor.dim() == 3 and all(place.is_replicate() or place.is_shard(0) for place in tensor.placements)


def _gathered(tensor: Tensor) -> Tensor:
    """The whole matrix or, of a stack sharded between its matrices, those held here."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if _by_matrix(tensor) else tensor.full_tensor()


class Muon(_Whole):
    """Nesterov momentum, orthogonalised, with decoupled weight decay (Jordan et al. 2024; Liu et al. 2025).

    A parameter is a matrix ``[out, in]`` or a stack of them ``[E, out, in]``. In a group with ``heads`` above 1 the
    rows of a matrix are that many equal blocks, each orthogonalised by itself. An update of m x n has the RMS
    ``0.2 * lr``, that of an AdamW step. Raises ``ValueError`` for a parameter of another shape.
    """

    # torch.optim.Muon takes one matrix at a time: no stacks of experts, no heads, no shards.

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        steps: int = 5,
        heads: int = 1,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps, "heads": heads}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        heads = self.param_groups[-1]["heads"]
        for parameter in self.param_groups[-1]["params"]:
            shape = list(parameter.shape)
            if len(shape) not in (2, 3):
                raise ValueError(f"a parameter is {shape}: Muon takes [out, in] and [E, out, in]")
            if heads < 1 or (heads > 1 and (len(shape) == 3 or shape[0] % heads)):
                raise ValueError(f"a parameter is {shape}: cannot split its rows into heads = {heads} equal blocks")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            by_size: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self._momentum(parameter).lerp_(parameter.grad, 1 - group["momentum"])
                direction = _gathered(parameter.grad.lerp(momentum, group["momentum"]))
                blocks = direction if direction.dim() == 3 else direction.unflatten(0, (group["heads"], -1))
                # Small matrices cost calls rather than arithmetic, so all of a size go into one batch.
                size = (*blocks.shape[1:], blocks.dtype, blocks.device)
                by_size.setdefault(size, []).append((parameter, blocks))
            for (rows, columns, *_), members in by_size.items():
                scale = ADAMW_RMS * max(rows, columns) ** 0.5
                updates = orthogonalise(torch.cat([blocks for _, blocks in members]), group["steps"]).mul_(scale)
                parts = updates.split([len(blocks) for _, blocks in members])
                for (parameter, _), part in zip(members, parts, strict=True):
                    self._apply(parameter, part if parameter.dim() == 3 else part.flatten(0, 1), group)


class SinkhornMomentum(_Whole):
    """Momentum whose rows and columns are balanced, for the embedding and the head ``[V, M]`` (report section 2.5).

    The update has the RMS ``0.2 * lr``, that of an AdamW step, in every row that has a gradient. The others stay where
    they are: balancing undoes the decay of momentum, and a token that was seen once would move on at full speed for a
    thousand steps. Weight decay is decoupled. Raises ``ValueError`` for what is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iterations: int = 5,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "iterations": iterations}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2:
                raise ValueError(f"a parameter is {list(parameter.shape)}: SinkhornMomentum takes [V, M]")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self._momentum(parameter).mul_(group["momentum"]).add_(parameter.grad)
                    seen = _gathered(parameter.grad).any(-1, keepdim=True)
                    update = balance(_gathered(momentum) * seen, group["iterations"]).mul_(ADAMW_RMS)
                    self._apply(parameter, update, group)


class OptimSettings(BaseModel):
    """Which optimiser each group of parameters gets, and the learning rates at the top of the schedule.

    Every group under AdamW has the rate ``lr_adamw``. ``momentum`` is that of Muon and of the balanced momentum,
    ``betas`` those of AdamW. Weight decay spares the group "small". Raises ``pydantic.ValidationError``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: Literal["muon", "adamw"] = "muon"
    queries: Literal["head-wise", "whole"] = "head-wise"
    embedding: Literal["sinkhorn", "adamw"] = "sinkhorn"
    lr_hidden: float = Field(default=0.01, gt=0)
    lr_embedding: float = Field(default=0.01, gt=0)
    lr_adamw: float = Field(default=3e-3, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)


def group_parameters(model: Model) -> dict[Group, list[tuple[str, nn.Parameter]]]:
    """Every trainable parameter of ``model`` in exactly one group, with its name.

    "queries" the up-projections whose rows are heads; "hidden" every other matrix of the layers, experts included;
    "embedding"; "head"; "indexer" all that the indexers own; "small" norms, sinks, mixers and routers. Raises
    ``ValueError`` for a parameter that no group expects.
    """
    groups: dict[Group, list[tuple[str, nn.Parameter]]] = {
        "queries": [], "hidden": [], "embedding": [], "head": [], "indexer": [], "small": []
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[_group(name, parameter.dim())].append((name, parameter))
    return groups


def _group(name: str, dimensions: int) -> Group:
    whole: dict[str, Group] = {"embed.weight": "embedding", "head.weight": "head"}
    if name in whole:
        return whole[name]
    if ".attn.indexer." in name:
        return "indexer"
    if dimensions < 2 or re.search(r"\.(hc_attn|hc_ffn)\.fn$|\.ffn\.gate\.weight$", name):
        return "small"
    if not name.startswith("layers."):
        raise ValueError(f"{name} is a matrix outside the layers: no group is known for it")
    return "queries" if name.endswith(".attn.wq_b.weight") else "hidden"


def optimisers(model: Model, settings: OptimSettings | None = None) -> list[Optimizer]:
    """The optimisers that together own every trainable parameter of ``model``, as ``settings`` divides them."""
    settings = settings or OptimSettings()
    groups = {name: [parameter for _, parameter in members] for name, members in group_parameters(model).items()}
    decay = settings.weight_decay
    found: list[Optimizer] = []
    rest: list[Group] = ["indexer", "small"]
    if settings.hidden == "muon":
        heads = model.config.text.num_attention_heads if settings.queries == "head-wise" else 1
        matrices: list[dict[str, Any]] = [{"params": groups["queries"], "heads": heads}, {"params": groups["hidden"]}]
        found.append(Muon(matrices, settings.lr_hidden, settings.momentum, decay))
    else:
        rest += ["queries", "hidden"]
    if settings.embedding == "sinkhorn":
        tables: list[dict[str, Any]] = [{"params": groups["embedding"]}, {"params": groups["head"]}]
        found.append(SinkhornMomentum(tables, settings.lr_embedding, settings.momentum, decay))
    else:
        rest += ["embedding", "head"]
    others = [
        {"params": groups[name], "weight_decay": 0.0 if name == "small" else decay} for name in rest if groups[name]
    ]
    fused = model.device.type in ("cpu", "cuda")
    return [*found, AdamW(others, settings.lr_adamw, settings.betas, fused=fused)]


class Optimisers:
    """Several optimisers that step as one, under one schedule of their learning rates."""

    def __init__(self, members: Iterable[Optimizer]) -> None:
        self.members = list(members)
        for group in self._groups():
            group.setdefault("initial_lr", group["lr"])

    def _groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()

    def set_rate(self, factor: float) -> None:
        """Set every learning rate to ``factor`` times its initial value."""
        for group in self._groups():
            group["lr"] = factor * group["initial_lr"]

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to continue bit for bit. The tensors are those in use: copy them to keep them."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Raises ``ValueError`` when it is that of other optimisers."""
        states = state["members"]
        if len(states) != len(self.members):
            raise ValueError(f"the state is of {len(states)} optimisers: there are {len(self.members)} here")
        for member, of_member in zip(self.members, states, strict=True):
            member.load_state_dict(of_member)
