"""Mixture of experts: a sqrt-softplus router with selection-only biases, routed experts by group, one shared expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from v41lib.config import TextConfig
from v41lib.nn.linear import Linear, linear


class Route(NamedTuple):
    """The experts of each of N tokens and their weights, FP32."""

    experts: Int[Tensor, "N K"]
    weights: Float[Tensor, "N K"]


def clamped_swiglu(gate: Float[Tensor, "... F"], up: Float[Tensor, "... F"], limit: float) -> Float[Tensor, "... F"]:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in FP32, then back to the input's dtype (SPEC 7)."""
    product = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return product.to(gate.dtype)


class Router(nn.Module):
    """Score every expert, choose the best k of score + bias, weigh them by their scores alone (SPEC 7).

    ``bias`` serves text tokens and ``bias_vl`` image tokens; both steer the choice and never the weight.
    """

    def __init__(self, text: TextConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.k, self.normalise, self.factor = text.num_experts_per_tok, text.norm_topk_prob, text.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(text.n_routed_experts, text.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(text.n_routed_experts, dtype=torch.float32), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.zeros(text.n_routed_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Float[Tensor, "N M"], is_image: Bool[Tensor, " N"] | None = None) -> Route:
        """Route each token; ``is_image`` marks the tokens that choose with ``bias_vl``."""
        logits = linear(x.float(), self.weight.float())
        positive = F.softplus(logits)
        # Where softplus underflows to zero, sqrt has an infinite slope, which would make every gradient NaN.
        scores = torch.where(positive > 0, positive.where(positive > 0, 1.0).sqrt(), 0.0)
        bias = self.bias if is_image is None else torch.where(is_image.unsqueeze(-1), self.bias_vl, self.bias)
        chosen = (scores + bias).topk(self.k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Route(chosen, weights * self.factor)


class Expert(nn.Module):
    """One SwiGLU with clamped branches, used as the shared expert (SPEC 7)."""

    def __init__(self, text: TextConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.limit = text.swiglu_limit
        self.w1 = Linear(text.hidden_size, text.moe_intermediate_size, dtype=dtype)
        self.w2 = Linear(text.moe_intermediate_size, text.hidden_size, dtype=dtype)
        self.w3 = Linear(text.hidden_size, text.moe_intermediate_size, dtype=dtype)

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        out: Tensor = self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit))
        return out


class Experts(nn.Module):
    """The routed experts, stacked ``[E, out, in]``; tokens are grouped by expert so that each weight is read once."""

    def __init__(self, text: TextConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        experts, width, inner = text.n_routed_experts, text.hidden_size, text.moe_intermediate_size
        self.limit = text.swiglu_limit
        self.w1 = nn.Parameter(torch.empty(experts, inner, width, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(experts, width, inner, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(experts, inner, width, dtype=dtype))

    def forward(self, x: Float[Tensor, "N M"], route: Route) -> Float[Tensor, "N M"]:
        """The FP32 weighted sum of each token's experts, added in order of expert number."""
        if len(x) == 1 and torch.compiler.is_compiling():
            return self._of_one(x, route)
        chosen = route.experts.flatten()
        order = chosen.argsort(stable=True)
        tokens, weights = order // route.experts.shape[-1], route.weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        matrices = zip(self.w1.unbind(), self.w2.unbind(), self.w3.unbind(), strict=True)  # one gradient for each stack
        sizes = chosen.bincount(minlength=len(self.w1)).tolist()
        for size, (w1, w2, w3) in zip(sizes, matrices, strict=True):
            if size:
                rows = tokens[start : start + size]
                inputs = x.index_select(0, rows)
                hidden = clamped_swiglu(linear(inputs, w1), linear(inputs, w3), self.limit)
                out.index_add_(0, rows, linear(hidden, w2).float() * weights[start : start + size])
                start += size
        return out

    def _of_one(self, x: Float[Tensor, "1 M"], route: Route) -> Float[Tensor, "1 M"]:
        """:meth:`forward` for one token and a compiler, which reads the chosen matrices in place: nothing is copied."""
        w1, w2, w3 = (weight[route.experts[0]].float() for weight in (self.w1, self.w2, self.w3))  # [K, out, in]
        gate, up = ((weight * x.float()).sum(-1).to(x.dtype) for weight in (w1, w3))
        hidden = clamped_swiglu(gate, up, self.limit).float().unsqueeze(-2)
        out = (w2 * hidden).sum(-1).to(x.dtype).float()
        return (out * route.weights.T).sum(0, keepdim=True)


class MoE(nn.Module):
    """The feed-forward sublayer: routed experts plus the shared one (SPEC 7)."""

    def __init__(self, text: TextConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate = Router(text, dtype)
        self.experts = Experts(text, dtype)
        self.shared_experts = Expert(text, dtype)

    def forward(
        self, x: Float[Tensor, "B S M"], is_image: Bool[Tensor, "B S"] | None = None
    ) -> tuple[Float[Tensor, "B S M"], Route]:
        """The output, and the route of the B*S tokens. ``is_image`` is None when no token is one."""
        flat = x.flatten(0, 1)
        route = self.gate(flat, None if is_image is None else is_image.flatten())
        out = self.experts(flat, route) + self.shared_experts(flat).float()
        return out.to(x.dtype).unflatten(0, x.shape[:2]), route
