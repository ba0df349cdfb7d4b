"""What is built: the released configuration, small presets, and the rules that a configuration must obey.

The field names are those of the released ``config.json``; a key that this library does not know is kept and written
back. Every violated rule is reported at once, with the field, its value and the rule.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from v41lib.resources import data_path

Size = Annotated[int, Field(strict=True, gt=0)]
Count = Annotated[int, Field(strict=True, ge=0)]
LayerId = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
# The base of the rotary frequencies: below or at 1, later pairs would not turn more slowly than earlier ones.
Base = Annotated[float, Field(strict=True, gt=1, allow_inf_nan=False)]
One = Annotated[int, Field(strict=True, ge=1, le=1)]


class _Section(BaseModel):
    """One JSON object of a configuration: frozen, checked on construction, unknown keys kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    @model_validator(mode="wrap")
    @classmethod
    def _everything_at_once(cls, values: Any, handler: Any) -> Any:
        """A field of the wrong type must not hide what the rules say of the others."""
        try:
            return handler(values)
        except ValidationError as error:
            fields = [e for e in error.errors() if e["loc"]]
            if not fields or not isinstance(values, dict):
                raise
            wrong = {e["loc"][0] for e in fields}
            partial = cls.model_construct(**{name: value for name, value in values.items() if name not in wrong})
            told = []
            for e in fields:
                field, message = ".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")
                if e["type"] == "missing":
                    told.append(f"{field} is missing: it is required")
                elif e["type"] == "value_error":  # a section, which has told of its own fields
                    told += [f"{field}.{line}" for line in message.split("; ")]
                else:
                    told.append(f"{field} = {e['input']!r}: {message}")
            raise ValueError("; ".join([*told, *partial._broken_rules()])) from None

    def _broken_rules(self) -> list[str]:
        """What the values break together; a rule that needs a value which is missing or wrong says nothing."""
        return []

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again.

        Raises ``ValueError`` for a name that is no field, and as the class does for a value that breaks a rule.
        """
        unknown = [name for name in changes if name not in type(self).model_fields]
        if unknown:
            raise ValueError(f"no field {', '.join(unknown)} in {type(self).__name__}")
        return type(self).model_validate(self.model_dump() | changes)

    def to_dict(self) -> dict[str, Any]:
        """The section in the released layout, as JSON types; unknown keys included."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=False)


class YarnScaling(_Section):
    """YaRN context extension of the rotary frequencies (SPEC 4; Peng et al. 2023)."""

    rope_type: Literal["yarn"] = "yarn"
    factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    original_max_position_embeddings: Size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast}: must not be below beta_slow = {self.beta_slow}")
        return self


class TextConfig(_Section):
    """The text backbone, with the shapes of Engram and DSpark (report sections 2 and 4; SPEC 1).

    Raises ``pydantic.ValidationError`` (a ``ValueError``) that lists every field that breaks a rule.
    """

    model_type: str = "deepseek_v41_text"
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    # attention
    num_attention_heads: Size
    num_key_value_heads: One = 1
    head_dim: Size
    qk_rope_head_dim: Size
    q_lora_rank: Size
    o_groups: Size
    o_lora_rank: Size
    sliding_window: Size
    attention_bias: StrictBool = False
    # positions
    max_position_embeddings: Size
    rope_theta: Base
    compress_rope_theta: Base
    rope_scaling: YarnScaling | None = None
    # who compresses, who selects, who is capped: read by v41lib.plan alone
    compress_ratios: tuple[Count, ...]
    kv_source_layer_ids: tuple[LayerId, ...]
    index_source_layer_ids: tuple[LayerId, ...]
    index_n_heads: Size
    index_head_dim: Size
    index_topk: Size
    candidate_source_layer_id: Annotated[int, Field(strict=True, ge=-1)] = -1
    candidate_topk_blocks: Count = 0
    candidate_block_size: Count = 0
    # mixture of experts
    moe_intermediate_size: Size
    n_routed_experts: Size
    n_shared_experts: One = 1
    num_experts_per_tok: Size
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: StrictBool = True
    routed_scaling_factor: Positive
    hidden_act: Literal["silu"] = "silu"
    swiglu_limit: Positive
    # norms and residual streams
    rms_norm_eps: Positive
    hc_mult: Size
    hc_sinkhorn_iters: Size
    hc_eps: Positive
    tie_word_embeddings: StrictBool = False
    # Engram
    engram_layer_ids: tuple[LayerId, ...] = ()
    engram_num_embeddings: tuple[Size, ...] = ()
    engram_max_ngram_size: Size = 4
    engram_vocab_size: Size = 16_000_000
    engram_n_heads: Size = 8
    engram_head_dim: Size = 256
    engram_pad_token_id: Count = 2
    engram_compressed_vocab_size: Size = 99_092
    # DSpark drafting stages; none unless stated
    num_nextn_predict_layers: Count = 0
    dspark_block_size: Size = 5
    dspark_noise_token_id: Count = 128_799
    dspark_target_layer_ids: tuple[LayerId, ...] = ()
    dspark_markov_rank: Size = 256
    dspark_n_routed_experts: Size = 128
    dspark_num_experts_per_tok: Size = 3

    @model_validator(mode="after")
    def _check(self) -> Self:
        if broken := self._broken_rules():
            raise ValueError("; ".join(broken))
        return self

    def _broken_rules(self) -> list[str]:
        broken = []
        for rules in (self._broken_shapes, self._broken_schedule, self._broken_extras):
            with suppress(AttributeError, TypeError):  # of a value that is missing or of the wrong type
                broken += rules()
        return broken

    def _broken_shapes(self) -> list[str]:
        broken = [
            f"{field} = true: must be false, the model has neither"
            for field in ("attention_bias", "tie_word_embeddings")
            if getattr(self, field)
        ]
        if self.num_attention_heads % self.o_groups:
            broken.append(
                f"num_attention_heads = {self.num_attention_heads}: must be a multiple of o_groups = {self.o_groups}"
            )
        if self.qk_rope_head_dim % 2:
            broken.append(f"qk_rope_head_dim = {self.qk_rope_head_dim}: must be even, channels rotate in pairs")
        for field in ("head_dim", "index_head_dim"):
            if self.qk_rope_head_dim > getattr(self, field):
                broken.append(
                    f"qk_rope_head_dim = {self.qk_rope_head_dim}: must not exceed {field} = {getattr(self, field)}"
                )
        if self.num_experts_per_tok > self.n_routed_experts:
            broken.append(
                f"num_experts_per_tok = {self.num_experts_per_tok}: "
                f"must not exceed n_routed_experts = {self.n_routed_experts}"
            )
        return broken

    def _broken_schedule(self) -> list[str]:
        layers, ratios, broken = self.num_hidden_layers, self.compress_ratios, []
        expected = layers + self.num_nextn_predict_layers
        if len(ratios) not in (layers, expected):
            stages = f" or {expected} (with one zero for each DSpark stage)" if expected != layers else ""
            broken.append(f"compress_ratios has {len(ratios)} entries: must have num_hidden_layers = {layers}{stages}")
        if any(ratios[layers:]):
            broken.append(
                f"compress_ratios[{layers}:] = {list(ratios[layers:])}: must be zeros, DSpark stages see windows only"
            )
        for field in ("kv_source_layer_ids", "index_source_layer_ids"):
            ids = getattr(self, field)
            if any(a >= b for a, b in pairwise(ids)):
                broken.append(f"{field} = {list(ids)}: must be strictly increasing")
            broken += [f"{field} names layer {i}: layers are 0 to {layers - 1}" for i in ids if i >= layers]
        if broken:  # the rules below would only repeat these in other words
            return broken

        for layer, ratio in enumerate(ratios[:layers]):
            owner = max((i for i in self.kv_source_layer_ids if i <= layer), default=None)
            named = [f for f in ("kv_source_layer_ids", "index_source_layer_ids") if layer in getattr(self, f)]
            if ratio == 0:
                broken += [f"{f} names layer {layer}: its compress_ratios entry is 0, it is local" for f in named]
            elif owner is None:
                broken.append(
                    f"compress_ratios[{layer}] = {ratio}: no kv_source_layer_ids entry at or before layer {layer}"
                )
            elif ratios[owner] != ratio:
                broken.append(
                    f"compress_ratios[{layer}] = {ratio}: its source, layer {owner}, has ratio {ratios[owner]}; "
                    "a layer reads the latest source, which must have its ratio"
                )
        missing = [i for i in self.kv_source_layer_ids if i not in self.index_source_layer_ids]
        if missing:
            broken.append(f"index_source_layer_ids lacks {missing}: every KV source must select for itself")

        cap = self.candidate_source_layer_id
        if cap != -1:
            last = self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else None
            if cap != last:
                broken.append(
                    f"candidate_source_layer_id = {cap}: "
                    f"must be the last of kv_source_layer_ids ({last}), or -1 for no cap"
                )
            for field in ("candidate_topk_blocks", "candidate_block_size"):
                if getattr(self, field) == 0:
                    broken.append(f"{field} = 0: must be positive when candidate_source_layer_id = {cap}")
        return broken

    def _broken_extras(self) -> list[str]:
        broken = []
        ids, rows = self.engram_layer_ids, self.engram_num_embeddings
        if len(ids) != len(rows):
            broken.append(
                f"engram_num_embeddings has {len(rows)} entries: "
                f"must have one for each of engram_layer_ids = {list(ids)}"
            )
        for field, needed in (
            ("engram_layer_ids", True),
            ("dspark_target_layer_ids", self.num_nextn_predict_layers > 0),
        ):
            values = getattr(self, field)
            if any(a >= b for a, b in pairwise(values)):
                broken.append(f"{field} = {list(values)}: must be strictly increasing")
            if needed:
                broken += [
                    f"{field} names layer {i}: layers are 0 to {self.num_hidden_layers - 1}"
                    for i in values
                    if i >= self.num_hidden_layers
                ]
        if ids and self.engram_max_ngram_size < 2:
            broken.append(f"engram_max_ngram_size = {self.engram_max_ngram_size}: must be at least 2")
        if ids and self.engram_pad_token_id >= self.vocab_size:
            broken.append(
                f"engram_pad_token_id = {self.engram_pad_token_id}: must be below vocab_size = {self.vocab_size}"
            )
        if self.num_nextn_predict_layers:
            if not self.dspark_target_layer_ids:
                broken.append("dspark_target_layer_ids = []: must name the layers that the DSpark stages read")
            if self.dspark_num_experts_per_tok > self.dspark_n_routed_experts:
                broken.append(
                    f"dspark_num_experts_per_tok = {self.dspark_num_experts_per_tok}: "
                    f"must not exceed dspark_n_routed_experts = {self.dspark_n_routed_experts}"
                )
            if self.dspark_noise_token_id >= self.vocab_size:
                broken.append(
                    f"dspark_noise_token_id = {self.dspark_noise_token_id}: "
                    f"must be below vocab_size = {self.vocab_size}"
                )
        return broken


class VisionConfig(_Section):
    """The vision tower and its aligner (report section 3; SPEC 9). Raises ``pydantic.ValidationError``."""

    model_type: str = "deepseek_v41_vision"
    num_hidden_layers: Count
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    patch_size: Size
    rope_theta: Base
    downsample_ratio: Size
    max_image_tokens: Size
    min_pixels: Size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size}: must be a multiple of 4 x num_attention_heads = "
                f"{4 * self.num_attention_heads}, rows and columns each rotate half of a head in pairs"
            )
        return self


class Config(_Section):
    """A whole ``config.json``: the text backbone, the vision tower if there is one, and the special tokens.

    Raises ``pydantic.ValidationError`` (a ``ValueError``) that lists every field that breaks a rule.
    """

    model_type: Literal["deepseek_v41"] = "deepseek_v41"
    image_token_id: Count
    text: TextConfig = Field(alias="text_config")
    vision: VisionConfig | None = Field(default=None, alias="vision_config")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Parse the released layout (``text_config``, ``vision_config``, other keys kept)."""
        return cls.model_validate(values)

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """Read a ``config.json``. Raises ``ValueError`` naming the file when it is not JSON or breaks a rule."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not a JSON file ({error})") from error
        if not isinstance(values, dict) or "text_config" not in values:
            raise ValueError(f"{path}: must be a JSON object with a text_config, as in the released config.json")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        if self.vision is None:  # the released layout leaves the tower out, it does not say null
            del values["vision_config"]
        return values

    def to_json(self) -> str:
        """The released ``config.json`` text, ending in a newline."""
        return json.dumps(self.to_dict(), indent=1) + "\n"


PRESETS = ("tiny", "wide", "miniature", "bench", "main", "capped", "small")


def preset(name: str) -> Config:
    """A small configuration that ships with the library: ``tiny`` and ``wide`` (the golden fixtures), ``miniature``
    (the released schedule of 40 layers at small widths), ``bench``, and ``main``, ``capped``
    and ``small``, which are trained.

    Raises ``ValueError`` for another name.
    """
    if name == "released":
        return released()
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: there are {', '.join(PRESETS)} and released")
    return Config.from_file(data_path("configs", f"{name}.json"))


def released() -> Config:
    """The configuration of DeepSeek-V4.1-Flash as released (SPEC 1)."""
    return Config.from_file(data_path("configs", "deepseek-v4.1-flash.json"))
