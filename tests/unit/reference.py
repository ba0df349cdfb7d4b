"""The text backbone once more, straight from the specification: dense, slow, in float64, masks over everything.

It shares no code with ``v41lib``: quantisers look values up in a table of codes, owners are found by scanning the
configuration, every query scores every entry, and what it may not see is masked afterwards. ``check_trace`` feeds each
stage the *library's* own inputs, so that one rounded element cannot cascade and no random seed has to be screened.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# --- number formats: nearest entry of a table, ties to the even code; FP32 scales as SPEC 4.1 says -------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
E4M3 = np.array(
    [
        (code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        for code in range(127)  # 127 is NaN
    ]
)
POWERS = 2.0 ** np.arange(-149, 128)


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The entry of ``table`` nearest to |x|, ties to the even index, with x's sign; beyond it, its last entry."""
    size = np.abs(x.astype(np.float64))
    above = np.searchsorted(table, size).clip(0, len(table) - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - size, size - table[below]
    pick_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    code = np.where(size >= table[-1], len(table) - 1, np.where(pick_below, below, above))
    return np.copysign(table[code], x).astype(np.float32)


def smallest_power(x: np.ndarray) -> np.ndarray:
    """The smallest power of two that is not below x."""
    return POWERS[np.searchsorted(POWERS, x.astype(np.float64))].astype(np.float32)


def round_trip(x: Tensor, fmt: str) -> Tensor:
    """``x [..., D]`` after a trip through ``fp8``, ``mxfp4`` or ``fp4``; FP32."""
    values = x.detach().numpy().astype(np.float32)
    width, block = values.shape[-1], {"fp8": 32, "mxfp4": 32, "fp4": 16}[fmt]
    count = math.ceil(width / block)
    padded = np.zeros((*values.shape[:-1], count * block), dtype=np.float32)
    padded[..., :width] = values
    blocks = padded.reshape(*values.shape[:-1], count, block)
    amax = np.abs(blocks).max(-1, keepdims=True) if blocks.size else np.zeros((*blocks.shape[:-1], 1), np.float32)
    f32 = np.float32
    if fmt == "fp8":
        scale, table = smallest_power(np.maximum(amax, f32(1e-4)) / f32(448)), E4M3
    elif fmt == "mxfp4":
        scale, table = smallest_power(np.maximum(amax, f32(6 * 2.0**-126)) / f32(6)), E2M1
    else:
        scale, table = nearest(np.maximum(amax, f32(6 * 2.0**-9)) / f32(6), E4M3), E2M1
    with np.errstate(over="ignore"):
        out = nearest(blocks / scale, table) * scale
    return torch.from_numpy(out.reshape(padded.shape)[..., :width].copy())


# --- the model -------------------------------------------------------------------------------------------------------


class Reference:
    """``weights`` are released names to tensors; ``text`` is any object with the fields of the text configuration."""

    def __init__(self, weights: dict[str, Tensor], text, image_token_id: int) -> None:
        self.w = {name: tensor.detach().double() for name, tensor in weights.items()}
        self.text, self.image_token_id = text, image_token_id

    # who reads whom: the latest source at or before the layer
    def owner(self, sources, layer: int) -> int:
        return max(source for source in sources if source <= layer)

    def ratio(self, layer: int) -> int:
        return self.text.compress_ratios[layer]

    def rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + self.text.rms_norm_eps).sqrt()
        return x if weight is None else x * weight

    def turns(self, positions: Tensor, layer: int) -> Tensor:
        """Unit complex numbers ``[positions, pairs]``."""
        text = self.text
        width, theta, yarn = text.qk_rope_head_dim, text.compress_rope_theta, text.rope_scaling
        if self.ratio(layer) == 0:
            theta, yarn = text.rope_theta, None
        pairs = []
        for pair in range(width // 2):
            frequency = theta ** (-2 * pair / width)
            if yarn is not None:
                context = yarn.original_max_position_embeddings

                def turning(turns, context=context):
                    return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

                low = max(math.floor(turning(yarn.beta_fast)), 0)
                high = min(math.ceil(turning(yarn.beta_slow)), width - 1)
                share = min(max((pair - low) / max(high - low, 0.001), 0), 1)
                frequency = frequency * (1 - share) + frequency / yarn.factor * share
            pairs.append(frequency)
        angles = positions.double().unsqueeze(-1) * torch.tensor(pairs, dtype=torch.float64)
        return torch.polar(torch.ones_like(angles), angles)

    def rotate(self, x: Tensor, positions: Tensor, layer: int, sign: int = 1) -> Tensor:
        """``x [B,S,...,D]``, rotated on the last channels by the position on axis 1."""
        turns = self.turns(positions, layer)
        turns = turns if sign > 0 else turns.conj()
        width = 2 * turns.shape[-1]
        pairs = torch.complex(x[..., -width::2], x[..., -width + 1 :: 2])
        turns = turns.reshape(1, len(positions), *(1,) * (x.dim() - 3), width // 2)
        return torch.cat((x[..., :-width], torch.view_as_real(pairs * turns).flatten(-2)), -1)

    def mix(self, x: Tensor, layer: int, site: str):
        text, n = self.text, self.text.hc_mult
        fn, scale, base = (self.w[f"layers.{layer}.hc_{site}_{part}"] for part in ("fn", "scale", "base"))
        flat = x.flatten(2)
        raw = (flat @ fn.T) / (flat.square().mean(-1, keepdim=True) + text.rms_norm_eps).sqrt()
        pre = torch.sigmoid(raw[..., :n] * scale[0] + base[:n]) + text.hc_eps
        post = 2 * torch.sigmoid(raw[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (raw[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + text.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + text.hc_eps)
        for _ in range(text.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + text.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + text.hc_eps)
        return pre, post, comb

    def collapse(self, x: Tensor, pre: Tensor) -> Tensor:
        return torch.einsum("bsn,bsnd->bsd", pre, x)

    def expand(self, x: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return torch.einsum("bsio,bsid->bsod", comb, x) + post.unsqueeze(-1) * out.unsqueeze(2)

    def start(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        n = self.text.hc_mult
        x = self.w["embed.weight"][ids].unsqueeze(2).repeat(1, 1, n, 1)
        pre = torch.zeros(*ids.shape, n, dtype=torch.float64)
        pre[..., 0] = 1
        return x, pre

    def q_latent(self, x: Tensor, layer: int) -> Tensor:
        at = f"layers.{layer}.attn."
        return self.rms(x @ self.w[at + "wq_a.weight"].T, self.w[at + "q_norm.weight"])

    def window_before_rounding(self, x: Tensor, layer: int) -> Tensor:
        at = f"layers.{layer}.attn."
        kv = self.rms(x @ self.w[at + "wkv.weight"].T, self.w[at + "kv_norm.weight"])
        return self.rotate(kv, torch.arange(x.shape[1]), layer)

    def latents(self, x: Tensor, layer: int) -> Tensor:
        at, ratio = f"layers.{layer}.attn.compressor.", self.ratio(layer)
        kv = x @ self.w[at + "wkv.weight"].T
        if ratio > 1:
            gate = x @ self.w[at + "wgate.weight"].T
            rows = []
            for group in range(x.shape[1] // ratio):
                members = slice(group * ratio, (group + 1) * ratio)
                rows.append((kv[:, members] * gate[:, members].softmax(1)).sum(1))
            kv = torch.stack(rows, 1) if rows else kv[:, :0]
        return self.rms(kv, self.w[at + "norm.weight"])

    def main_before_rounding(self, latents: Tensor, layer: int) -> Tensor:
        return self.rotate(latents, torch.arange(latents.shape[1]) * self.ratio(layer), layer)

    def keys_before_rounding(self, latents: Tensor, layer: int) -> Tensor:
        at = f"layers.{layer}.attn.indexer."
        keys = self.rms(latents @ self.w[at + "wk.weight"].T, self.w[at + "k_norm.weight"])
        return self.rotate(keys, torch.arange(latents.shape[1]) * self.ratio(layer), layer)

    def index_queries_before_rounding(self, x: Tensor, layer: int) -> Tensor:
        text = self.text
        q = self.q_latent(x, layer) @ self.w[f"layers.{layer}.attn.indexer.wq_b.weight"].T
        q = q.unflatten(-1, (text.index_n_heads, text.index_head_dim))
        return self.rotate(q, torch.arange(x.shape[1]), layer)

    def index_scores(self, x: Tensor, queries: Tensor, keys: Tensor, layer: int) -> Tensor:
        """Every query against every entry: ``[B,S,C]``."""
        text = self.text
        weights = x @ self.w[f"layers.{layer}.attn.indexer.weights_proj.weight"].T
        weights = weights * text.index_head_dim**-0.5 * text.index_n_heads**-0.5
        return torch.einsum("bsh,bshc->bsc", weights, torch.einsum("bshd,bcd->bshc", queries, keys).relu())

    def visible(self, length: int, layer: int) -> Tensor:
        """``[S,C]``: entry g when g < (i+1)//ratio."""
        ratio = self.ratio(layer)
        return torch.arange(length // ratio) < ((torch.arange(length) + 1) // ratio).unsqueeze(-1)

    def top(self, scores: Tensor, allowed: Tensor, k: int) -> Tensor:
        """The k best allowed entries as a mask, ties to the lower index."""
        order = scores.masked_fill(~allowed, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return torch.zeros_like(allowed).scatter_(-1, order, True) & allowed

    def candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        """The candidate pool as a mask: whole blocks, best first, the newest visible block always."""
        text, count = self.text, scores.shape[-1]
        size, kept = text.candidate_block_size, torch.zeros_like(scores, dtype=torch.bool)
        masked = scores.masked_fill(~visible, -math.inf)
        for row in np.ndindex(*scores.shape[:-1]):
            seen = int(visible[row[-1]].sum())
            blocks = {
                number: float(masked[row][number * size : (number + 1) * size].max())
                for number in range(math.ceil(count / size))
                if number * size < seen
            }
            newest = (seen - 1) // size if seen else None
            order = sorted(blocks, key=lambda number: (number != newest, -blocks[number], number))
            for number in order[: text.candidate_topk_blocks]:
                kept[row][number * size : (number + 1) * size] = True
        return kept & visible

    def attend(self, x: Tensor, window: Tensor, main: Tensor | None, chosen: Tensor | None, layer: int) -> Tensor:
        """``chosen [B,S,C]`` marks the compressed entries of each query. Returns the projected output ``[B,S,M]``."""
        text, at, length = self.text, f"layers.{layer}.attn.", x.shape[1]
        positions = torch.arange(length)
        q = (self.q_latent(x, layer) @ self.w[at + "wq_b.weight"].T).unflatten(-1, (text.num_attention_heads, -1))
        q = self.rotate(q, positions, layer)
        age = positions.unsqueeze(1) - positions
        allowed = ((age >= 0) & (age < text.sliding_window)).expand(x.shape[0], -1, -1)
        rows = window
        if main is not None:
            rows, allowed = torch.cat((window, main), 1), torch.cat((allowed, chosen), -1)
        logits = torch.einsum("bshd,btd->bsht", q, rows) * text.head_dim**-0.5
        logits = logits.masked_fill(~allowed.unsqueeze(2), -math.inf)
        sink = self.w[at + "attn_sink"].reshape(1, 1, -1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
        out = self.rotate(torch.einsum("bsht,btd->bshd", weights, rows), positions, layer, sign=-1).flatten(2)
        per_group = text.num_attention_heads * text.head_dim // text.o_groups
        low = [
            out[..., g * per_group : (g + 1) * per_group]
            @ self.w[at + "wo_a.weight"][g * text.o_lora_rank : (g + 1) * text.o_lora_rank].T
            for g in range(text.o_groups)
        ]
        return torch.cat(low, -1) @ self.w[at + "wo_b.weight"].T

    def router_scores(self, x: Tensor, layer: int) -> Tensor:
        return torch.nn.functional.softplus(x @ self.w[f"layers.{layer}.ffn.gate.weight"].T).sqrt()

    def route(self, x: Tensor, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The chosen experts as a mask ``[B,S,E]``, and by how much the last chosen beats the first not chosen."""
        at, k = f"layers.{layer}.ffn.gate.", self.text.num_experts_per_tok
        image = (ids == self.image_token_id).unsqueeze(-1)
        steered = self.router_scores(x, layer) + torch.where(image, self.w[at + "bias_vl"], self.w[at + "bias"])
        ordered = steered.sort(dim=-1, descending=True)
        chosen = torch.zeros_like(steered, dtype=torch.bool).scatter_(-1, ordered.indices[..., :k], True)
        if k == steered.shape[-1]:
            return chosen, torch.full(ids.shape, math.inf, dtype=torch.float64)
        return chosen, ordered.values[..., k - 1] - ordered.values[..., k]

    def moe(self, x: Tensor, chosen: Tensor, layer: int) -> Tensor:
        """Every expert on every token, weighed by zero where not chosen."""
        text, at = self.text, f"layers.{layer}.ffn."
        weights = self.router_scores(x, layer) * chosen
        if text.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * text.routed_scaling_factor

        def expert(stem: str) -> Tensor:
            w1, w2, w3 = (self.w[f"{at}{stem}.w{i}.weight"] for i in (1, 2, 3))
            gate, up = (x @ w1.T).clamp(max=text.swiglu_limit), x @ w3.T
            return (gate * gate.sigmoid() * up.clamp(-text.swiglu_limit, text.swiglu_limit)) @ w2.T

        routed = sum(weights[..., e : e + 1] * expert(f"experts.{e}") for e in range(text.n_routed_experts))
        return routed + expert("shared_experts")

    def head(self, x: Tensor, pre: Tensor) -> Tensor:
        return self.rms(self.collapse(x, pre), self.w["norm.weight"]) @ self.w["head.weight"].T

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """The whole model end to end; ``topk.L`` and ``cand.L`` are masks ``[B,S,C]`` here, ``route.L`` ``[B,S,E]``."""
        text, trace = self.text, {}
        x, pre = self.start(ids)
        main, keys, chosen, cand = {}, {}, {}, None
        for layer in range(text.num_hidden_layers):
            h = self.rms(self.collapse(x, pre), self.w[f"layers.{layer}.attn_norm.weight"])
            kv = selection = None
            if layer in text.kv_source_layer_ids:
                latents = self.latents(h, layer)
                main[layer] = round_trip(self.main_before_rounding(latents, layer), "fp4").double()
                keys[layer] = round_trip(self.keys_before_rounding(latents, layer), "mxfp4").double()
            if self.ratio(layer):
                kv = self.owner(text.kv_source_layer_ids, layer)
                if layer in text.index_source_layer_ids:
                    queries = round_trip(self.index_queries_before_rounding(h, layer), "mxfp4").double()
                    scores, allowed = self.index_scores(h, queries, keys[kv], layer), self.visible(ids.shape[1], layer)
                    if layer == text.candidate_source_layer_id:
                        cand = self.candidates(scores, allowed)
                    elif text.candidate_source_layer_id != -1 and layer > text.candidate_source_layer_id:
                        allowed = allowed & cand
                        trace[f"cand.{layer}"] = cand
                    chosen[layer] = self.top(scores, allowed.expand_as(scores), text.index_topk)
                    trace[f"topk.{layer}"] = chosen[layer]
                    if layer == text.candidate_source_layer_id:
                        trace[f"cand.{layer}"] = cand
                selection = chosen[self.owner(text.index_source_layer_ids, layer)]
            window = round_trip(self.window_before_rounding(h, layer), "fp8").double()
            out = self.attend(h, window, main.get(kv), selection, layer)
            pre, post, comb = self.mix(x, layer, "attn")
            x = self.expand(x, out, post, comb)
            _, post, comb = mixed = self.mix(x, layer, "ffn")
            h = self.rms(self.collapse(x, pre), self.w[f"layers.{layer}.ffn_norm.weight"])
            trace[f"route.{layer}"], _ = self.route(h, ids, layer)
            x, pre = self.expand(x, self.moe(h, trace[f"route.{layer}"], layer), post, comb), mixed[0]
            trace[f"streams.{layer}"] = x
        trace["logits"] = self.head(x, pre)
        return trace


# --- stage by stage against the library ------------------------------------------------------------------------------

# FP32 arithmetic over sums of at most a few hundred terms of order one, against float64.
CLOSE = 3e-5


def assert_close(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Equal to ``CLOSE`` of the reference's largest magnitude (at least 1)."""
    assert ours.shape == theirs.shape, f"{name}: {list(ours.shape)} and {list(theirs.shape)}"
    if ours.numel():
        gap = float((ours.double() - theirs).abs().max())
        assert gap <= CLOSE * max(1.0, float(theirs.abs().max())), f"{name}: parts by {gap:.3g}"


def roundings(exact: Tensor, fmt: str) -> list[Tensor]:
    """``exact`` rounded; then after four nudges by FP32's noise, of a scale (1e-5) and of an element (4e-6)."""
    exact = exact.float()
    noise = 4e-6 * exact.abs().amax(-1, keepdim=True) if exact.numel() else exact
    nudged = (exact, exact * (1 + 1e-5), exact * (1 - 1e-5), exact + noise, exact - noise)
    return [round_trip(value, fmt) for value in nudged]


def assert_rounded(name: str, ours: Tensor, exact: Tensor, fmt: str) -> None:
    """``ours`` is ``exact`` rounded; an element may sit one code away only where ``exact`` is at an edge."""
    assert ours.shape == exact.shape, f"{name}: {list(ours.shape)} and {list(exact.shape)}"
    fine = torch.stack([ours == value for value in roundings(exact, fmt)]).any(0)
    assert fine.all(), f"{name}: {int((~fine).sum())} of {fine.numel()} elements are not the rounded ones"


def as_mask(entries: Tensor, count: int) -> Tensor:
    """``[..., K]`` entry numbers, -1 absent, as ``[..., count]`` booleans; refuses duplicates and strangers."""
    assert ((entries >= -1) & (entries < count)).all(), "an entry outside the context"
    mask = torch.zeros(*entries.shape[:-1], count + 1, dtype=torch.bool)
    mask.scatter_(-1, torch.where(entries < 0, count, entries), True)
    mask = mask[..., :count]
    assert (mask.sum(-1) == (entries >= 0).sum(-1)).all(), "a duplicate entry"
    return mask


def assert_best(name: str, chosen: Tensor, scores: Tensor, allowed: Tensor, certain: Tensor, k: int) -> None:
    """Only allowed entries are ``chosen``, as many as must be, and in ``certain`` rows none worse than one left out."""
    assert not (chosen & ~allowed).any(), f"{name}: chose what it may not see"
    assert (chosen.sum(-1) == allowed.sum(-1).clamp(max=k)).all(), f"{name}: wrong count"
    if scores.shape[-1]:
        worst = scores.masked_fill(~chosen, math.inf).amin(-1)
        left_out = scores.masked_fill(chosen | ~allowed, -math.inf).amax(-1)
        assert (worst >= left_out - 1e-5)[certain].all(), f"{name}: left out a better one"


def check_trace(reference: Reference, trace: dict[str, Tensor], ids: Tensor) -> int:
    """Every stage of ``trace`` from the library's own inputs to it. Returns how many selections were certain."""
    text, length, checked = reference.text, ids.shape[1], 0
    x, pre = reference.start(ids)
    main, chosen, cand = {}, {}, None
    for layer in range(text.num_hidden_layers):
        h = reference.rms(reference.collapse(x, pre), reference.w[f"layers.{layer}.attn_norm.weight"])
        assert_close(f"attn_in.{layer}", trace[f"attn_in.{layer}"], h)
        h = trace[f"attn_in.{layer}"].double()
        kv = selection = None
        if layer in text.kv_source_layer_ids:
            latents = reference.latents(h, layer)
            main[layer] = (trace[f"main.{layer}"], trace[f"keys.{layer}"])
            assert_rounded(f"main.{layer}", main[layer][0], reference.main_before_rounding(latents, layer), "fp4")
            assert_rounded(f"keys.{layer}", main[layer][1], reference.keys_before_rounding(latents, layer), "mxfp4")
        if reference.ratio(layer):
            kv = reference.owner(text.kv_source_layer_ids, layer)
            if layer in text.index_source_layer_ids:
                count = length // reference.ratio(layer)
                entries = trace[f"topk.{layer}"]
                assert entries.shape == (*ids.shape, text.index_topk)
                chosen[layer] = as_mask(entries, count)
                raw = reference.index_queries_before_rounding(h, layer)
                rounded = roundings(raw, "mxfp4")
                # rows in which no element of a query is at a rounding edge: there the selection is certain
                certain = torch.stack([rounded[0] == other for other in rounded]).all(0).flatten(2).all(-1)
                scores = reference.index_scores(h, rounded[0].double(), main[kv][1].double(), layer)
                allowed = reference.visible(length, layer).expand_as(scores)
                capped = text.candidate_source_layer_id != -1
                if capped and layer == text.candidate_source_layer_id:
                    cand = trace[f"cand.{layer}"]
                    check_candidates(f"cand.{layer}", cand, scores, allowed, certain, text)
                elif capped and layer > text.candidate_source_layer_id:
                    assert torch.equal(trace[f"cand.{layer}"], cand)
                    allowed = allowed & cand
                assert_best(f"topk.{layer}", chosen[layer], scores, allowed, certain, text.index_topk)
                checked += int(certain.sum())
            selection = chosen[reference.owner(text.index_source_layer_ids, layer)]
        window = trace[f"window.{layer}"]
        assert_rounded(f"window.{layer}", window, reference.window_before_rounding(h, layer), "fp8")
        out = reference.attend(h, window.double(), None if kv is None else main[kv][0].double(), selection, layer)
        assert_close(f"attn_out.{layer}", trace[f"attn_out.{layer}"], out)

        pre, post, comb = reference.mix(x, layer, "attn")
        x = reference.expand(x, trace[f"attn_out.{layer}"].double(), post, comb)
        h = reference.rms(reference.collapse(x, pre), reference.w[f"layers.{layer}.ffn_norm.weight"])
        assert_close(f"ffn_in.{layer}", trace[f"ffn_in.{layer}"], h)
        h = trace[f"ffn_in.{layer}"].double()
        pre, post, comb = reference.mix(x, layer, "ffn")
        experts = as_mask(trace[f"route.{layer}"], text.n_routed_experts).unflatten(0, ids.shape)
        expected, margin = reference.route(h, ids, layer)
        sure = margin > 1e-5
        assert torch.equal(experts[sure], expected[sure]), f"route.{layer}: other experts"
        assert_close(f"ffn_out.{layer}", trace[f"ffn_out.{layer}"], reference.moe(h, experts, layer))
        x = reference.expand(x, trace[f"ffn_out.{layer}"].double(), post, comb)
        assert_close(f"streams.{layer}", trace[f"streams.{layer}"], x)
        x = trace[f"streams.{layer}"].double()
    assert_close("logits", trace["logits"], reference.head(x, pre))
    return checked


def check_candidates(name: str, pool: Tensor, scores: Tensor, visible: Tensor, certain: Tensor, text) -> None:
    """The pool is whole visible blocks, holds the newest, has as many as it must, and none worse than one left out."""
    size, limit = text.candidate_block_size, text.candidate_topk_blocks
    for row in np.ndindex(*pool.shape[:-1]):
        seen = int(visible[row].sum())
        assert not pool[row][seen:].any(), f"{name}: holds what is not visible"
        total = math.ceil(seen / size)
        blocks = [pool[row][number * size : min((number + 1) * size, seen)] for number in range(total)]
        assert all(bool(block.all()) or not bool(block.any()) for block in blocks), f"{name}: half a block"
        kept = [number for number, block in enumerate(blocks) if block.all()]
        assert len(kept) == min(total, limit), f"{name}: {len(kept)} blocks of {total}, limit {limit}"
        if total:
            assert kept[-1] == total - 1, f"{name}: the newest block is missing at {row}"
        if certain[row] and len(kept) < total:
            value = [
                float(scores[row][number * size : min((number + 1) * size, seen)].max()) for number in range(total)
            ]
            worst = min((value[number] for number in kept[:-1]), default=math.inf)
            left_out = max(value[number] for number in range(total) if number not in kept)
            assert worst >= left_out - 1e-5, f"{name}: left out a better block at {row}"
