"""Running the model as it is served: prefill, in chunks, exact or with bounded replay; decode; generate.

Exact prefill and decode equal the full forward pass. Replay runs the encoder on every token and the decoder on the last
ones only (SPEC 6): the global KV stays exact, the decoder's windows and the last logits become approximate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from v41lib.cache import Cache, Snapshot
from v41lib.model import Attend, Block, Encoded, Model, Residual
from v41lib.nn.compiled import check_compiler, compiled_steps
from v41lib.nn.compressor import pad_entries
from v41lib.nn.shared import Candidates, Selection, Shared

Mode = Literal["exact", "replay"]


class EngineError(ValueError):
    """A request that an engine cannot serve; the message says why and what it could serve instead."""


@dataclass(frozen=True)
class State:
    """Where a batch stands: the cache, the point in it, and the logits of the rows just run ``[B, m, V]``.

    A state stays usable after others were made from it, as long as the cache can go back to its point. ``skipped`` are
    the prompt positions that replay did not run through the decoder: they have no logits.
    """

    cache: Cache
    point: Snapshot
    logits: Float[Tensor, "B m V"]
    skipped: range
    model: Model

    @property
    def length(self) -> int:
        """How many tokens were fed."""
        return self.point.length

    def log_probs(self, position: int) -> Float[Tensor, "B V"]:
        """Log-probabilities of what follows ``position``. Raises ``EngineError`` where there are none."""
        first = self.length - self.logits.shape[1]
        if position in self.skipped:
            raise EngineError(
                f"position {position} has no logits: replay skipped {self.skipped.start} to {self.skipped.stop - 1} "
                "in the decoder; prefill with mode='exact' to have them"
            )
        if not first <= position < self.length:
            raise EngineError(f"position {position} has no logits here: this state holds {first} to {self.length - 1}")
        return self.logits[:, position - first].log_softmax(-1)


class Engine:
    """Serves one model. ``packed`` caches hold the release's bytes; plain ones the same values, faster to read.

    ``compiled``: decode of one token of one sequence runs through a C++ compiler, which takes half a minute at the
    first token. Raises ``CompilerError`` where there is none.
    """

    def __init__(self, model: Model, packed: bool = True, undo: int = 8, compiled: bool = False) -> None:
        self.model, self.packed, self.undo, self.compiled = model, packed, undo, compiled
        if compiled:
            check_compiler(model.device)

    @torch.no_grad()
    def prefill(
        self,
        ids: Int[Tensor, "B S"],
        mode: Mode = "exact",
        chunk: int | None = None,
        replay_from: int | None = None,
        replay_len: int | None = None,
    ) -> State:
        """Run a prompt into a new cache, ``chunk`` tokens at a time; the state holds the last position's logits.

        In ``replay`` mode, layers from ``replay_from`` (the first decoder layer) run on the last ``replay_len`` (W)
        tokens only, decided by absolute position, so the result does not depend on ``chunk``. Raises ``EngineError`` or
        ``ValueError`` naming an argument that is out of range.
        """
        ids = self.model.checked(ids)
        cache = Cache(self.model.config.text, ids.shape[0], self.model.embed.weight, self.packed, self.undo)
        return self.extend(cache, ids, mode, chunk, replay_from, replay_len)

    @torch.no_grad()
    def decode(self, state: State, ids: Int[Tensor, "B n"]) -> State:
        """Feed ``ids`` after ``state``; the new state holds the logits of all n. The old one stays usable.

        Raises ``EngineError`` for a state of another model or a batch of another size, ``CacheError`` when the cache
        cannot go back to the state.
        """
        if state.model is not self.model:
            raise EngineError("this state was made by another model: its cache means nothing here")
        ids = self.model.checked(ids)
        if ids.shape[0] != state.cache.batch:
            raise EngineError(f"ids is {list(ids.shape)}: the state holds a batch of {state.cache.batch}")
        state.cache.restore(state.point)
        self._fits(state.cache, ids)
        with compiled_steps(self.compiled and ids.numel() == 1):
            residual = self._layers(self._begin(ids), 0, len(self.model.layers), state.cache).residual
            logits = self.model.logits(residual)
        state.cache.advance(ids)
        return self._state(state.cache, logits, state.skipped)

    @torch.no_grad()
    def extend(
        self,
        cache: Cache,
        ids: Int[Tensor, "B S"],
        mode: Mode = "exact",
        chunk: int | None = None,
        replay_from: int | None = None,
        replay_len: int | None = None,
    ) -> State:
        """Run a prompt behind what a cache holds. Arguments and errors as in :meth:`prefill`."""
        model, length = self.model, ids.shape[1]
        self._fits(cache, ids)
        if mode not in get_args(Mode):
            raise EngineError(f"mode = {mode!r}: must be one of {', '.join(get_args(Mode))}")
        if chunk is not None and chunk < 1:
            raise EngineError(f"chunk = {chunk}: must be at least 1")
        if mode == "exact" and (replay_from, replay_len) != (None, None):
            raise EngineError("replay_from and replay_len mean something in mode='replay' only")
        first = model.cut if replay_from is None else replay_from
        if not model.cut <= first < len(model.layers) and mode == "replay":
            raise EngineError(
                f"replay_from = {first}: must be {model.cut} to {len(model.layers) - 1}, at or after the last KV source"
            )
        kept = model.config.text.sliding_window if replay_len is None else replay_len
        if kept < 1:
            raise EngineError(f"replay_len = {kept}: must be at least 1")

        start, end = cache.length, cache.length + length
        # The replay's first position. Rows that are all new and follow what the rings hold need no truncation.
        replayed = max(end - kept, start) if mode == "replay" else start
        tail = _Tail(end - replayed)
        last = first if mode == "replay" else len(model.layers)
        logits = None
        for part in ids.split(chunk or length, dim=1):
            done = self._layers(self._begin(part), 0, last, cache)
            if mode == "replay":
                if first == model.cut:
                    block = model.blocks[first]
                    shared = self._publish(block, block.attention_input(done.residual), done.shared, cache)
                    done = replace(done, shared=shared)
                tail.add(done, cache, model)
            else:
                logits = model.logits(_rows(done.residual, slice(-1, None)))
            cache.advance(part)
        if mode == "replay":
            logits = self._replay(tail, first, replayed, start, cache)
        assert logits is not None  # there is at least one chunk
        return self._state(cache, logits, range(start, replayed))

    def _replay(self, tail: _Tail, first: int, replayed: int, start: int, cache: Cache) -> Tensor:
        if replayed > start:
            for ring in cache.rings[first:]:
                ring.since = replayed
        end = cache.length
        cache.length = replayed  # the layers' rows begin here
        residual = self._layers(tail.state(cache, self.model), first, len(self.model.layers), cache).residual
        cache.length = end
        return self.model.logits(_rows(residual, slice(-1, None)))

    @torch.no_grad()
    def generate(
        self,
        ids: Int[Tensor, "B S"] | State,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        mode: Mode = "exact",
    ) -> Iterator[Int[Tensor, " B"]]:
        """Stream new tokens after a prompt or a state, one a step for each sequence; greedy at temperature 0.

        With a temperature, tokens are drawn from the smallest set whose probability reaches ``top_p``; ``seed`` makes
        the draw repeatable. Raises ``EngineError`` at once for arguments out of range.
        """
        if max_new_tokens < 0:
            raise EngineError(f"max_new_tokens = {max_new_tokens}: must not be negative")
        if temperature < 0 or not 0 < top_p <= 1:
            raise EngineError(f"temperature = {temperature}, top_p = {top_p}: must be >= 0, and in (0, 1]")
        state = ids if isinstance(ids, State) else self.prefill(ids, mode)
        return self._stream(state, max_new_tokens, temperature, top_p, seed)

    def _stream(self, state: State, count: int, temperature: float, top_p: float, seed: int | None) -> Iterator[Tensor]:
        generator = torch.Generator(self.model.device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        for step in range(count):
            token = choose(state.logits[:, -1], temperature, top_p, generator)
            yield token
            if step + 1 < count:
                state = self.decode(state, token.unsqueeze(1))

    # --- one pass through some layers --------------------------------------------------------------------------------

    def _begin(self, ids: Tensor) -> Encoded:
        return self.model.begin(ids)

    def _layers(self, state: Encoded, first: int, last: int, cache: Cache) -> Encoded:
        """Layers ``first`` to ``last - 1`` on rows that begin at the cache's length."""
        residual, shared = state.residual, state.shared
        for block in self.model.blocks[first:last]:
            residual, shared = block(residual, shared, state.is_image, None, self._attention(block, cache))
        return Encoded(residual, shared, state.is_image)

    def _attention(self, block: Block, cache: Cache) -> Attend:
        """Attention of one layer that reads the cache before its rows and leaves them in it."""
        attn, start, ring = block.attn, cache.length, cache.rings[block.plan.layer]

        def attend(x: Tensor, shared: Shared) -> tuple[Tensor, Shared]:
            if block.plan.owns_kv and (shared.kv is None or shared.kv.owner != block.plan.layer):
                shared = self._publish(block, x, shared, cache)
            window = attn.window_kv(x, range(start, start + x.shape[1]))
            keys = torch.cat((ring.before(start), window), dim=1)
            out, shared = attn.attend_rows(x, start, keys, shared)
            ring.write(start, window)
            return out, shared

        return attend

    def _publish(self, block: Block, x: Tensor, shared: Shared, cache: Cache) -> Shared:
        """Close the groups that ``x`` completes, store their rows, and share all rows of this source."""
        source, attn = cache.sources[block.plan.layer], block.attn
        latent, source.pending = attn.compressor.close(x, source.pending)
        number = cache.length // block.plan.ratio
        main, keys = attn.compressed(latent, number)
        source.main.write(number, main)
        source.keys.write(number, keys)
        return shared.publish(source.global_kv(block.plan.layer, block.plan.ratio))

    def _fits(self, cache: Cache, ids: Tensor) -> None:
        limit = self.model.config.text.max_position_embeddings
        if cache.length + ids.shape[1] > limit:
            raise EngineError(f"{cache.length} tokens and {ids.shape[1]} more: max_position_embeddings is {limit}")

    def _state(self, cache: Cache, logits: Tensor, skipped: range) -> State:
        return State(cache, cache.snapshot(), logits, skipped, self.model)


class _Tail:
    """The last rows of the encoder's output, gathered over chunks: what a replay runs on."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.parts: list[tuple[Encoded, Tensor | None, Tensor | None]] = []

    def add(self, done: Encoded, cache: Cache, model: Model) -> None:
        """Keep what is still needed of a chunk, with the selections and pools that layers before the replay made."""
        text = model.config.text
        entries = done.shared.selection.entries if done.shared.selection else None
        blocks = None
        if done.shared.candidates is not None:
            blocks = done.shared.candidates.blocks
            if blocks is None:  # everything fits the pool: the same, said in blocks
                total = -(-cache.sources[model.cut].main.count // text.candidate_block_size)
                blocks = torch.arange(total, device=model.device).expand(*done.residual.pre.shape[:2], -1)
            blocks = pad_entries(blocks, text.candidate_topk_blocks)
        if entries is not None:
            entries = pad_entries(entries, text.index_topk)
        self.parts.append((done, entries, blocks))
        spare = sum(part[0].residual.pre.shape[1] for part in self.parts) - self.length
        while spare > 0:
            oldest, old_entries, old_blocks = self.parts[0]
            rows = oldest.residual.pre.shape[1]
            if spare < rows:
                keep = slice(spare, None)
                self.parts[0] = (
                    replace(oldest, residual=_rows(oldest.residual, keep), is_image=_at(oldest.is_image, keep)),
                    _at(old_entries, keep),
                    _at(old_blocks, keep),
                )
                return
            self.parts.pop(0)
            spare -= rows

    def state(self, cache: Cache, model: Model) -> Encoded:
        """The gathered rows as the state that enters the first replayed layer."""
        text, plan = model.config.text, model.plans[model.cut]
        shared = Shared().publish(cache.sources[model.cut].global_kv(model.cut, plan.ratio))
        last = self.parts[-1][0].shared
        if last.selection is not None and last.selection.owner >= model.cut:
            entries = torch.cat([e for _, e, _ in self.parts if e is not None], dim=1)
            shared = shared.publish(Selection(last.selection.owner, entries))
        if last.candidates is not None:
            blocks = torch.cat([b for _, _, b in self.parts if b is not None], dim=1)
            shared = shared.publish(Candidates(last.candidates.owner, text.candidate_block_size, blocks))
        states = [part[0] for part in self.parts]
        streams = torch.cat([s.residual.streams for s in states], dim=1)
        pre = torch.cat([s.residual.pre for s in states], dim=1)
        images = None
        if any(s.is_image is not None for s in states):
            none = [torch.zeros_like(s.residual.pre[..., 0], dtype=torch.bool) for s in states]
            images = torch.cat([n if s.is_image is None else s.is_image for s, n in zip(states, none, strict=True)], 1)
        return Encoded(Residual(streams, pre), shared, images)


def _rows(residual: Residual, rows: slice) -> Residual:
    return Residual(residual.streams[:, rows], residual.pre[:, rows])


def _at(value: Tensor | None, rows: slice) -> Tensor | None:
    return None if value is None else value[:, rows]


def choose(
    logits: Float[Tensor, "B V"], temperature: float, top_p: float, generator: torch.Generator
) -> Int[Tensor, " B"]:
    """One token a sequence: the best at temperature 0, else drawn from the nucleus that reaches ``top_p``."""
    if temperature == 0:
        return logits.argmax(-1)
    ordered, tokens = (logits / temperature).softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # the first token is always in
    picked = torch.multinomial(ordered.masked_fill(before >= top_p, 0.0), 1, generator=generator)
    return tokens.gather(-1, picked).squeeze(-1)
