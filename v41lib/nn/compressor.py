"""The compressor: runs of ``ratio`` tokens become one latent. Only KV sources own one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from v41lib.config import TextConfig
from v41lib.nn.linear import Linear
from v41lib.nn.norm import RMSNorm


def pool(values: Float[Tensor, "B S D"], gates: Float[Tensor, "B S D"], ratio: int) -> Float[Tensor, "B C D"]:
    """Mix each closed group of ``ratio`` tokens, per channel, by the softmax of its gates; ``C = S // ratio``.

    Groups do not overlap. An open group at the end contributes nothing (SPEC 4).
    """
    groups = values.shape[1] // ratio
    values, gates = (x[:, : groups * ratio].unflatten(1, (groups, ratio)) for x in (values, gates))
    return (values * gates.softmax(2)).sum(2)


@dataclass(frozen=True)
class OpenGroup:
    """The projected tokens of a group that is not closed yet, fewer than ``ratio`` of them; no gates at ratio 1."""

    values: Float[Tensor, "B open D"]
    gates: Float[Tensor, "B open D_or_0"]


class Compressor(nn.Module):
    """From a layer's normed input to its latents, one a closed group, before rotation and rounding (SPEC 4).

    Ratio 1 has no gate. The projections are FP32, the result has the input's dtype.
    """

    def __init__(self, text: TextConfig, ratio: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = Linear(text.hidden_size, text.head_dim, dtype=torch.float32)
        self.norm = RMSNorm(text.head_dim, text.rms_norm_eps, dtype)
        if ratio > 1:
            self.wgate = Linear(text.hidden_size, text.head_dim, dtype=torch.float32)

    def forward(self, x: Float[Tensor, "B S M"]) -> Float[Tensor, "B C D"]:
        return self.close(x)[0]

    def close(
        self, x: Float[Tensor, "B S M"], pending: OpenGroup | None = None
    ) -> tuple[Float[Tensor, "B C D"], OpenGroup]:
        """The latents of the groups that ``x`` closes after ``pending`` tokens, and the group left open behind."""
        wide = x.float()
        values = self.wkv(wide)
        gates = self.wgate(wide) if self.ratio > 1 else values[..., :0]
        if pending is not None:
            values, gates = torch.cat((pending.values, values), 1), torch.cat((pending.gates, gates), 1)
        closed = values.shape[1] // self.ratio * self.ratio
        latent = pool(values, gates, self.ratio) if self.ratio > 1 else values
        normed: Tensor = self.norm(latent)
        return normed.to(x.dtype), OpenGroup(values[:, closed:], gates[:, closed:])


def visible_entries(positions: Int[Tensor, " S"], ratio: int) -> Int[Tensor, " S"]:
    """How many compressed entries a query at each position sees: entry g when ``g < (i+1)//ratio`` (SPEC 4)."""
    return torch.div(positions + 1, ratio, rounding_mode="floor")


def pad_entries(entries: Int[Tensor, "... K"], width: int) -> Int[Tensor, "... W"]:
    """Extend ``entries`` with -1 (absent) to ``width`` columns."""
    return F.pad(entries, (0, width - entries.shape[-1]), value=-1)
