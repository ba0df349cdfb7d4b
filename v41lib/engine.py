"""Running the model as it is served: prefill, in chunks, exact or with bounded replay; decode; resume; generate.

Exact prefill and decode equal the full forward pass. Replay runs the encoder on every token and the decoder on the last
ones only (SPEC 6): the global KV stays exact, the decoder's windows and the last logits become approximate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from v41lib.cache import Cache, Lane, Snapshot
from v41lib.model import Model
from v41lib.nn.attention import Record
from v41lib.nn.compiled import check_compiler, compiled_steps
from v41lib.passes import Tail, publish, rows_of, run_layers

Mode = Literal["exact", "replay"]
Windows = Literal["kept", "replay", "exact"]
Lengths = Int[Tensor, " B"] | Sequence[int]

# Rows of a prompt that run together unless a caller says otherwise: enough to fill every expert, few enough that the
# streams between layers stay near a cache.
CHUNK = 2048


class EngineError(ValueError):
    """A request that an engine cannot serve; the message says why and what it could serve instead."""


@dataclass(frozen=True)
class State:
    """Where a batch stands: the cache, the point in it, and the logits of each sequence's rows just run ``[B, m, V]``.

    A state stays usable after others were made from it, as long as the cache can go back to its point. ``lengths`` says
    how many tokens each sequence was fed, ``skipped`` which of its prompt positions replay did not run through the
    decoder: they have no logits.
    """

    cache: Cache
    point: Snapshot
    logits: Float[Tensor, "B m V"]
    lengths: tuple[int, ...]
    skipped: tuple[range, ...]
    model: Model

    @property
    def length(self) -> int:
        """How many tokens each sequence was fed. Raises ``EngineError`` when that differs between them."""
        if len(set(self.lengths)) > 1:
            raise EngineError(f"the sequences have {list(self.lengths)} tokens: read lengths")
        return self.lengths[0]

    def prefix(self, length: int | None = None) -> Cache:
        """What a prefix cache keeps of this state's first ``length`` tokens (all), whatever was fed after it.

        ``cache`` itself moves on with every later step. Errors as ``Cache.prefix`` says.
        """
        return self.cache.prefix(length, self.point)

    def log_probs(self, position: int | Sequence[int]) -> Float[Tensor, "B V"]:
        """Log-probabilities of what follows ``position``, one for all or one for each sequence.

        Raises ``EngineError`` where there are none.
        """
        rows, positions = [], [position] * len(self.lengths) if isinstance(position, int) else list(position)
        if len(positions) != len(self.lengths):
            raise EngineError(f"{len(positions)} positions: the state holds a batch of {len(self.lengths)}")
        for row, (at, length, skipped) in enumerate(zip(positions, self.lengths, self.skipped, strict=True)):
            first = length - self.logits.shape[1]
            if at in skipped:
                raise EngineError(
                    f"position {at} of sequence {row} has no logits: replay skipped {skipped.start} to "
                    f"{skipped.stop - 1} in the decoder; run with mode='exact' to have them"
                )
            if not first <= at < length:
                raise EngineError(
                    f"position {at} of sequence {row} has no logits here: this state holds {first} to {length - 1}"
                )
            rows.append(self.logits[row, at - first])
        return torch.stack(rows).log_softmax(-1)


@dataclass(frozen=True)
class Prefill:
    """How a prompt is run: ``chunk`` tokens at a time, through all layers or, in a replay, through those before
    ``first`` and then through the others on the last ``kept`` tokens.
    """

    mode: Mode
    chunk: int
    first: int
    kept: int


class Engine:
    """Serves one model. ``packed`` caches hold the release's bytes; plain ones the same values, faster to read.

    ``stale_keys`` reproduces one published reference, a deviation from the model: in a decode step of one token, a KV
    source whose group stays open, and the layers that select from its KV, score the keys that were published last,
    which are the last KV source's as they stood after the step before. Entries are still numbered and limited by the
    source's own ratio, and a step that has nothing to choose is unaffected (CASES 1).

    ``compiled``: decode of one token of one sequence runs through a C++ compiler, which takes half a minute at the
    first token. Raises ``CompilerError`` where there is none.
    """

    def __init__(
        self,
        model: Model,
        packed: bool = True,
        undo: int = 8,
        stale_keys: bool = False,
        compiled: bool = False,
    ) -> None:
        if undo < 0:
            raise EngineError(f"undo = {undo}: must not be negative")
        self.model, self.packed, self.undo, self.stale_keys, self.compiled = model, packed, undo, stale_keys, compiled
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
        lengths: Lengths | None = None,
        record: Record | None = None,
    ) -> State:
        """Run a prompt into a new cache, ``chunk`` (2,048) tokens at a time; the state holds the last logits.

        ``lengths`` says how much of each row of ``ids`` is prompt; what follows is padding and never looked at. In
        ``replay`` mode, layers from ``replay_from`` (the first decoder layer) run on each sequence's last
        ``replay_len`` (W) tokens only, decided by absolute position, so the result does not depend on ``chunk``.
        ``record`` gets what ``Model.trace`` names, once a chunk; sequences must have one length then. Raises
        ``EngineError`` or ``ValueError`` naming an argument that is out of range.
        """
        plan = self._plan(mode, chunk, replay_from, replay_len)
        ids, each = self._checked(ids, lengths)
        text, like = self.model.config.text, self.model.embed.weight
        lanes = [
            Lane(text, [row for row, own in enumerate(each) if own == length], like, self.packed, self.undo)
            for length in sorted(set(each))
        ]
        prompts = [ids[lane.rows, :length] for lane, length in zip(lanes, sorted(set(each)), strict=True)]
        return self._prefilled(lanes, prompts, plan, record)

    @torch.no_grad()
    def decode(self, state: State, ids: Int[Tensor, "B n"], record: Record | None = None) -> State:
        """Feed ``ids`` after ``state``; the new state holds the logits of all n. The old one stays usable.

        ``record`` as in :meth:`prefill`. Raises ``EngineError`` for a state of another model or a batch of another
        size, ``CacheError`` when the cache cannot go back to the state.
        """
        model, cache = self.model, state.cache
        if state.model is not model:
            raise EngineError("this state was made by another model: its cache means nothing here")
        ids = model.checked(ids)
        if ids.shape[0] != cache.batch:
            raise EngineError(f"ids is {list(ids.shape)}: the state holds a batch of {cache.batch}")
        for lane, mark in zip(cache.lanes, state.point, strict=True):
            self._fits(lane, mark.length, ids.shape[1])
        self._recordable(cache.lanes, record)
        cache.restore(state.point)
        parts, n = cache.split(ids), ids.shape[1]
        rows = ids if len(parts) == 1 else torch.cat([part.flatten() for part in parts]).unsqueeze(0)
        stale = self.stale_keys and n == 1
        with compiled_steps(self.compiled and ids.numel() == 1):
            done = run_layers(model, model.begin(rows), cache.lanes, 0, len(model.layers), stale, record)
            logits = model.logits(done.residual).flatten(0, 1).split([part.numel() for part in parts])
        for lane, part in zip(cache.lanes, parts, strict=True):
            lane.advance(part)
        joined = cache.join([part.unflatten(0, (-1, n)) for part in logits])
        return State(cache, cache.snapshot(), joined, tuple(cache.lengths), state.skipped, model)

    @torch.no_grad()
    def resume(
        self,
        cache: Cache | State,
        ids: Int[Tensor, "B S"],
        windows: Windows = "kept",
        mode: Mode = "exact",
        chunk: int | None = None,
        replay_from: int | None = None,
        replay_len: int | None = None,
        rerun_len: int | None = None,
        lengths: Lengths | None = None,
    ) -> State:
        """Run ``ids`` behind the prefix of H tokens that ``cache`` holds, in a copy: the prefix may be hit again.

        A :class:`State` stands for what its cache held at its point.

        Rows of global KV are reused and never written again. ``windows`` says where the window KV comes from:

        - ``kept``: it is in the cache.
        - ``replay`` (SPEC 6, encoder bounded replay): the last ``rerun_len`` (W) prefix tokens are run again, seeing no
          window key before the first of them; they also rebuild the groups that are open at H, for which the re-run
          begins earlier if it must. The result depends on H. A re-run that reaches position 0 is a cold run.
        - ``exact``: as many prefix tokens are run again as make the result that of a cold run.

        A cold run computes everything anew and is :meth:`prefill` of prefix and ``ids``. The other arguments are those
        of :meth:`prefill`: in ``replay`` mode only layers before ``replay_from`` run again, and the decoder's replay
        takes the last ``replay_len`` tokens of prefix and ``ids``. Raises ``EngineError`` or ``ValueError`` for
        arguments out of range, and for windows that are not there.
        """
        plan = self._plan(mode, chunk, replay_from, replay_len)
        ids, each = self._checked(ids, lengths)
        if windows not in get_args(Windows):
            raise EngineError(f"windows = {windows!r}: must be one of {', '.join(get_args(Windows))}")
        if rerun_len is not None and (windows != "replay" or rerun_len < 1):
            raise EngineError(f"rerun_len = {rerun_len}: must be at least 1, and means something in windows='replay'")
        if isinstance(cache, State):
            if windows == "kept":
                cache.cache.restore(cache.point)
            cache = cache.cache if windows == "kept" else cache.prefix()
        if any(lane.like is not self.model.embed.weight for lane in cache.lanes):
            raise EngineError("this cache was made by another model: it means nothing here")
        if ids.shape[0] != cache.batch:
            raise EngineError(f"ids is {list(ids.shape)}: the cache holds a batch of {cache.batch}")
        if windows == "kept" and not all(lane.rings for lane in cache.lanes):
            raise EngineError(
                "windows = 'kept': this cache keeps none; use 'replay' to rebuild them approximately or 'exact' exactly"
            )
        lanes, prompts = [], []
        for lane in cache.lanes:
            for length in sorted({each[row] for row in lane.rows}):
                self._fits(lane, lane.length, length)
                places = [place for place, row in enumerate(lane.rows) if each[row] == length]
                rows = [lane.rows[place] for place in places]
                begin = lane.length
                if windows == "replay":
                    begin = self._again_from(lane, length, plan, rerun_len)
                elif windows == "exact":
                    begin = self._exact_from(lane, length, plan)
                own = lane.taken(places, rows, None if windows == "kept" else lane.length if begin else 0)
                if windows != "kept":
                    own.rerun_from(begin)
                lanes.append(own)
                prompts.append(torch.cat((lane.tokens[places, begin : lane.length], ids[rows, :length]), dim=1))
        return self._prefilled(lanes, prompts, plan)

    @torch.no_grad()
    def generate(
        self,
        ids: Int[Tensor, "B S"] | State,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        mode: Mode = "exact",
        lengths: Lengths | None = None,
    ) -> Iterator[Int[Tensor, " B"]]:
        """Stream new tokens after a prompt or a state, one a step for each sequence; greedy at temperature 0.

        With a temperature, tokens are drawn from the smallest set whose probability reaches ``top_p``; ``seed`` makes
        the draw repeatable. ``mode`` and ``lengths`` are for a prompt, as in :meth:`prefill`. Raises ``EngineError`` at
        once for arguments out of range.
        """
        if max_new_tokens < 0:
            raise EngineError(f"max_new_tokens = {max_new_tokens}: must not be negative")
        if not temperature >= 0 or not 0 < top_p <= 1:
            raise EngineError(f"temperature = {temperature}, top_p = {top_p}: must be >= 0, and in (0, 1]")
        if isinstance(ids, State) and lengths is not None:
            raise EngineError("lengths are those of a prompt: a state knows its own")
        if isinstance(ids, State) and ids.model is not self.model:
            raise EngineError("this state was made by another model: its cache means nothing here")
        state = ids if isinstance(ids, State) else self.prefill(ids, mode, lengths=lengths)
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

    # --- a prompt, lane by lane --------------------------------------------------------------------------------------

    def _prefilled(
        self, lanes: list[Lane], prompts: list[Tensor], plan: Prefill, record: Record | None = None
    ) -> State:
        self._recordable(lanes, record)
        runs = [self._run(lane, ids, plan, record) for lane, ids in zip(lanes, prompts, strict=True)]
        cache = Cache(lanes)
        logits, skipped = cache.join([run[0] for run in runs]), cache.spread([run[1] for run in runs])
        return State(cache, cache.snapshot(), logits, tuple(cache.lengths), tuple(skipped), self.model)

    def _run(self, lane: Lane, ids: Tensor, plan: Prefill, record: Record | None) -> tuple[Tensor, range]:
        """Run ``ids`` behind what a lane holds: the last position's logits, and the positions that replay skipped."""
        model, start, end = self.model, lane.length, lane.length + ids.shape[1]
        replay, layers = plan.mode == "replay", len(model.layers)
        # The replay's first position. Rows that are all new and follow what the rings hold need no truncation.
        replayed = max(end - plan.kept, start) if replay else start
        tail, residual = Tail(end - replayed), None
        for part in ids.split(plan.chunk, dim=1):
            done = run_layers(model, model.begin(part), [lane], 0, plan.first if replay else layers, record=record)
            if replay:
                if plan.first == model.cut:
                    block = model.blocks[plan.first]
                    shared = publish(block, block.attention_input(done.residual), done.shared, lane)
                    done = replace(done, shared=shared)
                tail.add(done, lane, model)
            residual = done.residual
            lane.advance(part)
        if replay:
            if replayed > start:
                for ring in lane.rings[plan.first :]:
                    ring.since = replayed
            lane.length = replayed  # the layers' rows begin here
            residual = run_layers(model, tail.state(lane, model), [lane], plan.first, layers, record=record).residual
            lane.length = end
        assert residual is not None  # there is at least one chunk
        return model.logits(rows_of(residual, slice(-1, None))), range(start, replayed)

    def _again_from(self, lane: Lane, more: int, plan: Prefill, count: int | None) -> int:
        """Where a re-run of ``count`` prefix tokens begins; 0 is a cold run."""
        length = lane.length
        begin = length - (self.model.config.text.sliding_window if count is None else count)
        opened = [length // p.ratio * p.ratio for p in self.model.plans if p.owns_kv]
        begin = max(min([begin, *opened]), 0)
        if begin and plan.mode == "replay" and length + more - plan.kept < begin:
            raise EngineError(
                f"replay_len = {plan.kept}: {more} new tokens and the {length - begin} that run again are fewer; use a "
                "larger rerun_len or windows='exact'"
            )
        return begin

    def _exact_from(self, lane: Lane, more: int, plan: Prefill) -> int:
        """The last position from which a re-run gives every later query all that a cold run would; 0 is a cold run.

        A layer's input at a position is exact if the re-run begins W - 1 positions earlier for each layer before it.
        """
        length, replay = lane.length, plan.mode == "replay"
        reach, layers = self.model.config.text.sliding_window - 1, plan.first if replay else len(self.model.layers)
        begins = [length - reach - layer * reach for layer in range(layers)]  # window KV that the next token sees
        begins += [
            length // p.ratio * p.ratio - p.layer * reach
            for p in self.model.plans
            if p.owns_kv and length % p.ratio  # its open group
        ]
        if replay:
            begins.append(length + more - plan.kept - layers * reach)  # the rows that the decoder replays
        return max(min(begins, default=0), 0)

    # --- what is refused ---------------------------------------------------------------------------------------------

    def _plan(self, mode: Mode, chunk: int | None, replay_from: int | None, replay_len: int | None) -> Prefill:
        model = self.model
        if mode not in get_args(Mode):
            raise EngineError(f"mode = {mode!r}: must be one of {', '.join(get_args(Mode))}")
        for name, value in (("chunk", chunk), ("replay_from", replay_from), ("replay_len", replay_len)):
            if value is not None and (not isinstance(value, int) or value < (name != "replay_from")):
                raise EngineError(f"{name} = {value}: must be an integer, and at least 1")
        if mode == "exact" and (replay_from, replay_len) != (None, None):
            raise EngineError("replay_from and replay_len mean something in mode='replay' only")
        first = model.cut if replay_from is None else replay_from
        if not model.cut <= first < len(model.layers) and mode == "replay":
            raise EngineError(
                f"replay_from = {first}: must be {model.cut} to {len(model.layers) - 1}, at or after the last KV source"
            )
        kept = model.config.text.sliding_window if replay_len is None else replay_len
        return Prefill(mode, CHUNK if chunk is None else chunk, first, kept)

    def _checked(self, ids: Tensor, lengths: Lengths | None) -> tuple[Tensor, list[int]]:
        """``ids`` without their padding's values, on the model's device, and each row's length."""
        if lengths is None or not isinstance(ids, Tensor) or ids.dim() != 2:
            ids = self.model.checked(ids)
            return ids, [ids.shape[1]] * ids.shape[0]
        each = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        whole = isinstance(each, Sequence) and all(isinstance(own, int) and not isinstance(own, bool) for own in each)
        if not whole or len(each) != ids.shape[0]:
            raise EngineError(f"lengths = {lengths}: must be {ids.shape[0]} integers, one for each row of ids")
        each = list(each)
        for row, length in enumerate(each):
            if not 1 <= length <= ids.shape[1]:
                raise EngineError(f"lengths[{row}] = {length}: must be 1 to {ids.shape[1]}, the width of ids")
        ids = ids[:, : max(each, default=0)]
        padding = torch.arange(ids.shape[1]) >= torch.tensor(each).unsqueeze(1)
        return self.model.checked(ids.masked_fill(padding.to(ids.device), 0)), each

    def _fits(self, lane: Lane, length: int, more: int) -> None:
        limit = self.model.config.text.max_position_embeddings
        if length + more > limit:
            raise EngineError(f"{lane}: {length} tokens and {more} more: max_position_embeddings is {limit}")

    def _recordable(self, lanes: Sequence[Lane], record: Record | None) -> None:
        if record and len(lanes) > 1:
            raise EngineError(f"sequences of {len(lanes)} lengths cannot be recorded together: run them one by one")


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
