"""The text backbone: wiring only. A causal encoder, a decoder that begins at the last KV source, and a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from v41lib.config import Config, TextConfig
from v41lib.nn.attention import Attention, Record
from v41lib.nn.compiled import token_wise
from v41lib.nn.hyper import HyperConnection, Mix, collapse, expand
from v41lib.nn.linear import Linear
from v41lib.nn.moe import MoE
from v41lib.nn.norm import RMSNorm
from v41lib.nn.shared import Shared
from v41lib.plan import LayerPlan, first_decoder_layer, plan_layers

Attend = Callable[[Tensor, Shared], tuple[Tensor, Shared]]


@dataclass(frozen=True)
class Residual:
    """What flows from layer to layer: the streams, and the carried FP32 ``pre`` through which they are read."""

    streams: Float[Tensor, "B S R M"]
    pre: Float[Tensor, "B S R"]


@dataclass(frozen=True)
class Encoded:
    """The encoder's result: the residual entering the decoder, and the global KV that the whole decoder shares.

    ``is_image`` marks image tokens, None when there are none.
    """

    residual: Residual
    shared: Shared
    is_image: Bool[Tensor, "B S"] | None = None


class Block(nn.Module):
    """One layer: attention, then experts, each reading the streams through the previous sublayer's pre (SPEC 3)."""

    def __init__(self, text: TextConfig, plan: LayerPlan, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.plan = plan
        mixer = (text.hc_mult, text.hidden_size, text.hc_sinkhorn_iters, text.hc_eps, text.rms_norm_eps)
        self.hc_attn, self.hc_ffn = HyperConnection(*mixer), HyperConnection(*mixer)
        self.attn_norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype)
        self.ffn_norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype)
        self.attn = Attention(text, plan, dtype)
        self.ffn = MoE(text, dtype)

    def attention_input(self, residual: Residual) -> Float[Tensor, "B S M"]:
        """The normed input of attention; also what a KV source compresses."""
        normed: Tensor = self.attn_norm(collapse(residual.streams, residual.pre))
        return normed

    def forward(
        self,
        residual: Residual,
        shared: Shared,
        is_image: Bool[Tensor, "B S"] | None = None,
        record: Record | None = None,
        attend: Attend | None = None,
    ) -> tuple[Residual, Shared]:
        """One layer on all rows. ``attend`` replaces attention over the whole sequence, as an engine needs it."""
        note = record or (lambda name, value: None)
        attn_in, mix = self.before_attention(residual.streams, residual.pre)
        note("attn_in", attn_in)
        attn_out, shared = attend(attn_in, shared) if attend else self.attn(attn_in, shared, record)
        note("attn_out", attn_out)
        streams, pre, ffn_in, ffn_out, experts = self.after_attention(residual.streams, attn_out, mix, is_image)
        note("ffn_in", ffn_in)
        note("route", experts)
        note("ffn_out", ffn_out)
        note("streams", streams)
        return Residual(streams, pre), shared

    @token_wise
    def before_attention(
        self, streams: Float[Tensor, "B S R M"], pre: Float[Tensor, "B S R"]
    ) -> tuple[Float[Tensor, "B S M"], Mix]:
        """Attention's input, and the coefficients that will spread its output."""
        mix: Mix = self.hc_attn(streams)
        return self.attention_input(Residual(streams, pre)), mix

    @token_wise
    def after_attention(
        self,
        streams: Float[Tensor, "B S R M"],
        attn_out: Float[Tensor, "B S M"],
        mix: Mix,
        is_image: Bool[Tensor, "B S"] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The rest of the layer: the new streams and their pre; the experts' input, output and choice for a trace."""
        streams, pre = expand(streams, attn_out, mix.post, mix.comb), mix.pre
        mix = self.hc_ffn(streams)
        ffn_in = self.ffn_norm(collapse(streams, pre))
        ffn_out, route = self.ffn(ffn_in, is_image)
        return expand(streams, ffn_out, mix.post, mix.comb), mix.pre, ffn_in, ffn_out, route.experts


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse, with ``ValueError``, a dtype in which the model is not computed: FP16 cannot hold its norms' epsilon."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype = {dtype}: must be torch.float32 or torch.bfloat16")


class Model(nn.Module):
    """The exact text backbone on any schedule that validates (SPEC 2-7).

    ``model(input_ids)`` gives the FP32 logits of every position. Weights are drawn from ``seed``, except on the meta
    device. ``dtype`` (float32 or bfloat16) is that of the matrices; what every port keeps in FP32 stays FP32.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device = {device}: torch sees no CUDA device; use 'cpu'")
        self.config, text = config, config.text
        self.plans = plan_layers(text)
        self.cut = first_decoder_layer(text)
        with torch.device("meta"):  # nothing is drawn twice, and the global generator is left alone
            self.embed = nn.Embedding(text.vocab_size, text.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList(Block(text, plan, dtype) for plan in self.plans)
            self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype)
            self.head = Linear(text.hidden_size, text.vocab_size, dtype=torch.float32)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.initialise(seed)

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every matrix from N(0, 1/fan_in) with one CPU generator, so that a seed means the same on any device.

        Norm weights and mHC scales start at one, biases and sinks at zero.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                std = 0.02 if name == "embed.weight" else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            else:
                weight.fill_(float(name.endswith(("norm.weight", ".scale"))))

    def forward(self, input_ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
        """The FP32 logits of every position: :meth:`decode` of :meth:`encode`.

        Raises ``ValueError`` for input that is not ``[B,S]`` integers within the vocabulary and
        ``max_position_embeddings``.
        """
        return self.decode(self.encode(input_ids))

    def begin(self, ids: Int[Tensor, "B S"]) -> Encoded:
        """The state before layer 0: the embedding in every stream; the first sublayer reads stream 0 (SPEC 3)."""
        streams = self.embed(ids).unsqueeze(2).repeat(1, 1, self.config.text.hc_mult, 1)
        pre = torch.zeros(*ids.shape, self.config.text.hc_mult, device=ids.device)
        pre[..., 0] = 1.0
        is_image = ids == self.config.image_token_id
        return Encoded(Residual(streams, pre), Shared(), is_image if bool(is_image.any()) else None)

    def encode(self, input_ids: Int[Tensor, "B S"], record: Record | None = None) -> Encoded:
        """Layers before the cut on every token, then the last KV source's global KV from their output (SPEC 6)."""
        encoded = self._run(self.begin(self.checked(input_ids)), 0, self.cut, record)
        if self.cut < len(self.layers):
            source = self.blocks[self.cut]
            kv = source.attn.publish(source.attention_input(encoded.residual))
            encoded = Encoded(encoded.residual, encoded.shared.publish(kv), encoded.is_image)
        return encoded

    def decode(self, encoded: Encoded, record: Record | None = None) -> Float[Tensor, "B S V"]:
        """Layers from the cut on, then the head, on the rows of ``encoded``: FP32 logits (SPEC 6)."""
        logits = self.logits(self._run(encoded, self.cut, len(self.layers), record).residual)
        if record:
            record("logits", logits)
        return logits

    def logits(self, residual: Residual) -> Float[Tensor, "B S V"]:
        """The head on what leaves the last layer: collapse with the carried pre, final norm, FP32 matrix (SPEC 3)."""
        return self._logits(residual.streams, residual.pre)

    @token_wise
    def _logits(self, streams: Tensor, pre: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(collapse(streams, pre)).float())
        return out

    @torch.no_grad()
    def trace(self, input_ids: Int[Tensor, "B S"]) -> dict[str, Tensor]:
        """Every intermediate of one forward pass, in order of computation; names end in ``.L`` for layer L.

        ``streams.L`` the residual that leaves the block ``[B,S,R,M]``; ``window.L``, ``main.L``, ``keys.L`` what a
        cache would hold; ``topk.L`` the selection ``[B,S,K]`` (ascending, -1 absent); ``cand.L`` the candidates as a
        mask ``[B,S,C]``; ``scored.L`` how many visible index keys each query was multiplied with ``[B,S]``, 0 where
        everything visible is kept unscored (so it depends on how queries are grouped); ``route.L`` the experts
        ``[B*S,K]``; ``attn_in.L``, ``attn_out.L``, ``ffn_in.L`` and ``ffn_out.L`` each sublayer's ends ``[B,S,M]``; at
        the end ``logits``.
        """
        tensors: dict[str, Tensor] = {}
        self.decode(self.encode(input_ids, tensors.__setitem__), tensors.__setitem__)
        return tensors

    def _run(self, state: Encoded, first: int, last: int, record: Record | None) -> Encoded:
        residual, shared = state.residual, state.shared
        for layer in range(first, last):
            note = None if record is None else (lambda name, value, layer=layer: record(f"{name}.{layer}", value))
            residual, shared = self.layers[layer](residual, shared, state.is_image, note)
        return Encoded(residual, shared, state.is_image)

    def checked(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` on the model's device. Raises as :meth:`forward` says."""
        text = self.config.text
        if text.engram_layer_ids:
            raise NotImplementedError(
                f"engram_layer_ids = {list(text.engram_layer_ids)}: this version builds and counts such a model but "
                "does not compute Engram; run a configuration without it"
            )
        if not isinstance(input_ids, Tensor):
            raise ValueError(
                f"input_ids is a {type(input_ids).__name__}: must be a tensor, int64 or int32 [batch, length]"
            )
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"input_ids is {input_ids.dtype} {list(input_ids.shape)}: must be int64 or int32 [batch, length]"
            )
        if not input_ids.numel():
            raise ValueError(f"input_ids is {list(input_ids.shape)}: there must be at least one sequence of one token")
        if input_ids.shape[1] > text.max_position_embeddings:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens: max_position_embeddings is {text.max_position_embeddings}"
            )
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= text.vocab_size:
            raise ValueError(
                f"input_ids holds {low if low < 0 else high}: token ids are 0 to {text.vocab_size - 1} (vocab_size)"
            )
        return input_ids.to(self.device)
