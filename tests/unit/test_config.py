"""Configurations: what is accepted, what is refused and in which words; nothing is lost on the way to a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import v41lib
from tests.unit.support import SMALL, configs, random_model, schedules, small_config, small_text, tokens
from v41lib import Config, Model, TextConfig, VisionConfig, preset, released


def refusal(**changes: Any) -> str:
    """The message with which the small text configuration, changed, is refused."""
    with pytest.raises(ValueError) as error:
        small_text(**changes)
    return str(error.value)


# --- accepted --------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(config=configs(), length=st.integers(1, 14), seed=st.integers(0, 99))
def test_every_valid_schedule_builds_and_runs(config: Config, length: int, seed: int) -> None:
    meta = Model(config, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    model = random_model(config, seed)
    shapes = [(name, weight.shape) for name, weight in meta.named_parameters()]
    assert shapes == [(name, weight.shape) for name, weight in model.named_parameters()]
    with torch.no_grad():
        logits = model(tokens(length, batch=2, seed=seed))
    assert logits.shape == (2, length, config.text.vocab_size)
    assert logits.isfinite().all()


@given(schedule=schedules(max_layers=12))
def test_every_schedule_of_the_specification_is_accepted(schedule: dict[str, Any]) -> None:
    text = small_text(**schedule)
    assert text.compress_ratios == tuple(schedule["compress_ratios"])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            dict(
                num_hidden_layers=3,
                compress_ratios=[0, 0, 0],
                kv_source_layer_ids=[],
                index_source_layer_ids=[],
                candidate_source_layer_id=-1,
            ),
            id="all local",
        ),
        pytest.param(
            dict(
                num_hidden_layers=1,
                compress_ratios=[1],
                kv_source_layer_ids=[0],
                index_source_layer_ids=[0],
                candidate_source_layer_id=0,
            ),
            id="one layer that is everything",
        ),
        pytest.param(
            dict(
                compress_ratios=[3, 0, 3, 0, 7, 0, 7], kv_source_layer_ids=[0, 4], index_source_layer_ids=[0, 2, 4, 6]
            ),
            id="local layers anywhere, odd ratios",
        ),
        pytest.param(dict(candidate_source_layer_id=-1, candidate_topk_blocks=0, candidate_block_size=0), id="no cap"),
        pytest.param(
            dict(
                compress_ratios=[0, 0, 2, 2, 1, 1, 1, 0, 0],
                num_nextn_predict_layers=2,
                dspark_target_layer_ids=[6],
                dspark_noise_token_id=3,
            ),
            id="stages' zeros",
        ),
        pytest.param(
            dict(num_nextn_predict_layers=2, dspark_target_layer_ids=[6], dspark_noise_token_id=3),
            id="stages, no zeros",
        ),
        pytest.param(dict(qk_rope_head_dim=8), id="index head all rotary"),
        pytest.param(dict(num_experts_per_tok=4), id="all experts"),
        pytest.param(dict(rope_scaling=None), id="no YaRN"),
        pytest.param(dict(hc_mult=1, hc_sinkhorn_iters=1), id="one stream"),
        pytest.param(dict(index_topk=10_000, sliding_window=10_000), id="selection and window beyond any prompt"),
    ],
)
def test_unusual_but_consistent_is_accepted_and_runs(changes: dict[str, Any]) -> None:
    with torch.no_grad():
        assert random_model(small_config(**changes))(tokens(9)).isfinite().all()


# --- refused ---------------------------------------------------------------------------------------------------------

SIZES = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "max_position_embeddings", "index_n_heads",
    "index_head_dim", "index_topk", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "hc_mult", "hc_sinkhorn_iters",
    "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size",
    "dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
]  # fmt: skip
COUNTS = [
    "candidate_topk_blocks", "candidate_block_size", "engram_pad_token_id", "num_nextn_predict_layers",
    "dspark_noise_token_id",
]  # fmt: skip
FIXED = ["num_key_value_heads", "n_shared_experts"]
REALS = ["rope_theta", "compress_rope_theta", "routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hc_eps"]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("field", SIZES)
def test_sizes_must_be_positive(field: str, value: int) -> None:
    message = refusal(**{field: value})
    assert field in message
    assert f"= {value}" in message or f"= {value}" in message
    assert "greater than 0" in message


@pytest.mark.parametrize("field", COUNTS)
def test_counts_must_not_be_negative(field: str) -> None:
    message = refusal(**{field: -1})
    assert field in message
    assert "= -1" in message
    assert "greater than or equal to 0" in message


@pytest.mark.parametrize("value", [True, "3", 2.5, 2.0, None, [2]], ids=repr)
@pytest.mark.parametrize("field", SIZES + COUNTS + ["candidate_source_layer_id"])
def test_integers_must_be_integers(field: str, value: Any) -> None:
    message = refusal(**{field: value})
    assert field in message
    assert f"= {value!r}" in message
    assert "valid integer" in message


@pytest.mark.parametrize("value", [True, "1", 1.0, 2], ids=repr)
@pytest.mark.parametrize("field", FIXED)
def test_fixed_integers_accept_only_their_integer(field: str, value: Any) -> None:
    message = refusal(**{field: value})
    assert field in message
    assert "1" in message


@pytest.mark.parametrize("value", [0, "no", 1.0, True], ids=repr)
@pytest.mark.parametrize("field", ["attention_bias", "tie_word_embeddings"])
def test_fixed_booleans_accept_only_false(field: str, value: Any) -> None:
    assert field in refusal(**{field: value})


@pytest.mark.parametrize("value", ["no", "true", 1, 0.0, None], ids=repr)
def test_booleans_must_be_booleans(value: Any) -> None:
    assert "norm_topk_prob" in refusal(norm_topk_prob=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf, "1", True], ids=repr)
@pytest.mark.parametrize("field", REALS)
def test_reals_must_be_positive_and_finite(field: str, value: Any) -> None:
    message = refusal(**{field: value})
    assert field in message
    assert f"= {value!r}" in message


def test_reals_may_be_written_as_integers() -> None:
    assert small_text(rope_theta=10000).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(factor=0.0), ["rope_scaling.factor", "greater than 0"]),
        (dict(factor=math.nan), ["rope_scaling.factor", "nan"]),
        (dict(original_max_position_embeddings=0), ["rope_scaling.original_max_position_embeddings", "greater than 0"]),
        (dict(original_max_position_embeddings=True), ["rope_scaling.original_max_position_embeddings", "True"]),
        (dict(beta_fast=1.0, beta_slow=2.0), ["beta_fast = 1", "beta_slow = 2"]),
        (dict(rope_type="linear"), ["rope_scaling.rope_type", "linear", "yarn"]),
    ],
)
def test_yarn_is_checked(changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(rope_scaling=SMALL["rope_scaling"] | changes)
    assert all(word in message for word in words), message


def test_a_base_that_does_not_turn_is_refused_and_not_divided_by() -> None:
    """YaRN divides by log(theta); every base that makes slower pairs slower is above 1."""
    message = refusal(compress_rope_theta=1.0)
    assert "compress_rope_theta" in message
    assert "1.0" in message


INCONSISTENT = {
    "heads not divisible by groups": (
        dict(num_attention_heads=3, o_groups=2),
        ["num_attention_heads = 3", "multiple of o_groups = 2"],
    ),
    "odd rotary width": (dict(qk_rope_head_dim=3), ["qk_rope_head_dim = 3", "even"]),
    "rotary wider than the head": (dict(head_dim=2), ["qk_rope_head_dim = 4", "not exceed head_dim = 2"]),
    "rotary wider than the index head": (
        dict(index_head_dim=2),
        ["qk_rope_head_dim = 4", "not exceed index_head_dim = 2"],
    ),
    "top-k above experts": (
        dict(num_experts_per_tok=5),
        ["num_experts_per_tok = 5", "not exceed n_routed_experts = 4"],
    ),
    "too few ratios": (
        dict(compress_ratios=[0, 0, 2, 2, 1, 1]),
        ["compress_ratios has 6 entries", "num_hidden_layers = 7"],
    ),
    "too many ratios": (
        dict(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1]),
        ["compress_ratios has 8 entries", "num_hidden_layers = 7"],
    ),
    "no ratios": (dict(compress_ratios=[]), ["compress_ratios has 0 entries", "num_hidden_layers = 7"]),
    "some zeros for stages": (
        dict(
            compress_ratios=[0, 0, 2, 2, 1, 1, 1, 0],
            num_nextn_predict_layers=2,
            dspark_target_layer_ids=[6],
            dspark_noise_token_id=0,
        ),
        ["compress_ratios has 8 entries", "7", "9"],
    ),
    "stages that compress": (
        dict(
            compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1],
            num_nextn_predict_layers=1,
            dspark_target_layer_ids=[6],
            dspark_noise_token_id=0,
        ),
        ["compress_ratios[7:] = [1]", "zeros"],
    ),
    "negative ratio": (
        dict(compress_ratios=[0, 0, 2, 2, 1, 1, -1]),
        ["compress_ratios.6", "-1", "greater than or equal to 0"],
    ),
    "sources out of order": (dict(kv_source_layer_ids=[4, 2]), ["kv_source_layer_ids = [4, 2]", "increasing"]),
    "duplicate source": (dict(kv_source_layer_ids=[2, 2, 4]), ["kv_source_layer_ids = [2, 2, 4]", "increasing"]),
    "source out of range": (dict(kv_source_layer_ids=[2, 7]), ["kv_source_layer_ids names layer 7", "0 to 6"]),
    "negative source": (
        dict(kv_source_layer_ids=[-1, 4]),
        ["kv_source_layer_ids.0", "-1", "greater than or equal to 0"],
    ),
    "index sources out of order": (
        dict(index_source_layer_ids=[2, 5, 4]),
        ["index_source_layer_ids = [2, 5, 4]", "increasing"],
    ),
    "duplicate index source": (
        dict(index_source_layer_ids=[2, 4, 4]),
        ["index_source_layer_ids = [2, 4, 4]", "increasing"],
    ),
    "index source out of range": (
        dict(index_source_layer_ids=[2, 4, 9]),
        ["index_source_layer_ids names layer 9", "0 to 6"],
    ),
    "local layer as a KV source": (
        dict(kv_source_layer_ids=[1, 2, 4], index_source_layer_ids=[1, 2, 4]),
        ["kv_source_layer_ids names layer 1", "compress_ratios entry is 0", "local"],
    ),
    "local layer as an index source": (
        dict(index_source_layer_ids=[0, 2, 4]),
        ["index_source_layer_ids names layer 0", "compress_ratios entry is 0", "local"],
    ),
    "consumer before any source": (
        dict(compress_ratios=[0, 2, 2, 2, 1, 1, 1]),
        ["compress_ratios[1] = 2", "no kv_source_layer_ids entry at or before layer 1"],
    ),
    "consumer of another ratio": (
        dict(compress_ratios=[0, 0, 2, 1, 1, 1, 1]),
        ["compress_ratios[3] = 1", "layer 2", "ratio 2"],
    ),
    "consumer of an older source": (
        dict(compress_ratios=[0, 0, 2, 2, 1, 1, 2]),
        ["compress_ratios[6] = 2", "layer 4", "ratio 1"],
    ),
    "KV source that does not select": (
        dict(index_source_layer_ids=[2, 5]),
        ["index_source_layer_ids lacks [4]", "every KV source"],
    ),
    "cap source not the last KV source": (
        dict(candidate_source_layer_id=2),
        ["candidate_source_layer_id = 2", "last of kv_source_layer_ids (4)", "-1"],
    ),
    "cap source that is no KV source": (
        dict(candidate_source_layer_id=5),
        ["candidate_source_layer_id = 5", "last of kv_source_layer_ids (4)"],
    ),
    "cap source below -1": (dict(candidate_source_layer_id=-2), ["candidate_source_layer_id", "-2"]),
    "cap without any KV source": (
        dict(compress_ratios=[0] * 7, kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=0),
        ["candidate_source_layer_id = 0", "None", "-1"],
    ),
    "cap of no blocks": (dict(candidate_topk_blocks=0), ["candidate_topk_blocks = 0", "positive"]),
    "cap of empty blocks": (dict(candidate_block_size=0), ["candidate_block_size = 0", "positive"]),
    "Engram lists of different lengths": (
        dict(engram_layer_ids=[1, 3], engram_num_embeddings=[10]),
        ["engram_num_embeddings has 1 entries", "engram_layer_ids = [1, 3]"],
    ),
    "Engram rows without layers": (dict(engram_num_embeddings=[10]), ["engram_num_embeddings has 1 entries"]),
    "Engram table without rows": (
        dict(engram_layer_ids=[1], engram_num_embeddings=[0]),
        ["engram_num_embeddings.0", "greater than 0"],
    ),
    "Engram layers out of order": (
        dict(engram_layer_ids=[3, 1], engram_num_embeddings=[10, 10]),
        ["engram_layer_ids = [3, 1]", "increasing"],
    ),
    "Engram layer out of range": (
        dict(engram_layer_ids=[7], engram_num_embeddings=[10]),
        ["engram_layer_ids names layer 7", "0 to 6"],
    ),
    "Engram of single tokens": (
        dict(engram_layer_ids=[1], engram_num_embeddings=[10], engram_max_ngram_size=1),
        ["engram_max_ngram_size = 1", "at least 2"],
    ),
    "Engram pad beyond the vocabulary": (
        dict(engram_layer_ids=[1], engram_num_embeddings=[10], engram_pad_token_id=40),
        ["engram_pad_token_id = 40", "below vocab_size = 40"],
    ),
    "DSpark without targets": (
        dict(num_nextn_predict_layers=1, dspark_noise_token_id=0),
        ["dspark_target_layer_ids = []", "must name"],
    ),
    "DSpark target out of range": (
        dict(num_nextn_predict_layers=1, dspark_noise_token_id=0, dspark_target_layer_ids=[7]),
        ["dspark_target_layer_ids names layer 7", "0 to 6"],
    ),
    "DSpark targets out of order": (
        dict(num_nextn_predict_layers=1, dspark_noise_token_id=0, dspark_target_layer_ids=[6, 5]),
        ["dspark_target_layer_ids = [6, 5]", "increasing"],
    ),
    "DSpark top-k above its experts": (
        dict(
            num_nextn_predict_layers=1, dspark_noise_token_id=0, dspark_target_layer_ids=[6], dspark_n_routed_experts=2
        ),
        ["dspark_num_experts_per_tok = 3", "not exceed dspark_n_routed_experts = 2"],
    ),
    "DSpark noise beyond the vocabulary": (
        dict(num_nextn_predict_layers=1, dspark_target_layer_ids=[6]),
        ["dspark_noise_token_id = 128799", "below vocab_size = 40"],
    ),
    "another scoring function": (dict(scoring_func="sigmoid"), ["scoring_func", "sigmoid", "sqrtsoftplus"]),
    "another activation": (dict(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    "another way to choose": (dict(topk_method="greedy"), ["topk_method", "greedy", "noaux_tc"]),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_inconsistent_is_refused_with_field_value_and_rule(case: str) -> None:
    changes, words = INCONSISTENT[case]
    message = refusal(**changes)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def test_everything_broken_is_reported_at_once() -> None:
    message = refusal(qk_rope_head_dim=3, num_experts_per_tok=9, candidate_source_layer_id=2, engram_layer_ids=[9])
    for field in (
        "qk_rope_head_dim",
        "num_experts_per_tok",
        "candidate_source_layer_id",
        "engram_layer_ids",
        "engram_num_embeddings",
    ):
        assert field in message


def test_a_short_list_of_ratios_does_not_blame_the_sources() -> None:
    """Layers 4 and 5 are within 0 to 6; only the list of ratios is wrong."""
    assert "names layer" not in refusal(compress_ratios=[0, 0, 2, 2])


@given(schedule=schedules(max_layers=8), data=st.data())
def test_any_change_to_a_valid_schedule_is_refused_or_still_runs(schedule: dict[str, Any], data: st.DataObject) -> None:
    """Whatever validation lets through must work: there is no third outcome."""
    field = data.draw(st.sampled_from(("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")))
    values = list(schedule[field])
    change = data.draw(st.sampled_from(("drop", "add", "set")))
    at = data.draw(st.integers(0, max(len(values) - 1, 0)))
    if change == "add":
        values.insert(at, data.draw(st.integers(0, 8)))
    elif values and change == "drop":
        values.pop(at)
    elif values:
        values[at] = data.draw(st.integers(0, 8))
    try:
        config = small_config(**(schedule | {field: values}))
    except ValueError:
        return
    with torch.no_grad():
        assert random_model(config)(tokens(7)).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(hidden_size=20), ["hidden_size = 20", "4 x num_attention_heads = 16"]),
        (dict(patch_size=0), ["patch_size", "greater than 0"]),
        (dict(rope_theta=math.nan), ["rope_theta", "nan"]),
        (dict(num_hidden_layers=True), ["num_hidden_layers", "True"]),
    ],
)
def test_vision_is_checked(changes: dict[str, Any], words: list[str]) -> None:
    good = dict(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=8, patch_size=2, rope_theta=1e4,
        downsample_ratio=3, max_image_tokens=16, min_pixels=1,
    )  # fmt: skip
    VisionConfig.model_validate(good)
    with pytest.raises(ValueError) as error:
        VisionConfig.model_validate(good | changes)
    assert all(word in str(error.value) for word in words)


def test_replace_checks_again_and_leaves_the_original() -> None:
    text = small_text()
    assert text.replace(index_topk=9).index_topk == 9
    assert text.index_topk == SMALL["index_topk"]
    with pytest.raises(ValidationError, match="index_topk"):
        text.replace(index_topk=0)
    with pytest.raises(ValidationError, match="frozen"):
        text.index_topk = 3  # type: ignore[misc]


# --- files -----------------------------------------------------------------------------------------------------------


def test_round_trip_keeps_unknown_keys_at_every_level(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "image_token_id": IMAGE,
        "architectures": ["SomethingForCausalLM"],
        "quantization_config": {"scale_fmt": "ue8m0", "nested": {"deep": [1, 2.5, None, True, "ü"]}},
        "text_config": SMALL
        | {"novel": {"a": [1, {"b": None}]}, "rope_scaling": SMALL["rope_scaling"] | {"mscale": 1.5, "odd": [False]}},
        "vision_config": released().to_dict()["vision_config"] | {"novel": [1]},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    config = Config.from_file(path)
    (tmp_path / "again.json").write_text(config.to_json(), encoding="utf-8")
    written = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
    assert_contains(written, values)
    assert Config.from_file(tmp_path / "again.json") == config


IMAGE = 12


def assert_contains(written: Any, given_values: Any, at: str = "") -> None:
    """Everything given is in what was written, with the same type for whatever is not a number."""
    if isinstance(given_values, dict):
        for key, value in given_values.items():
            assert key in written, f"{at}.{key} was lost"
            assert_contains(written[key], value, f"{at}.{key}")
    else:
        assert written == given_values, at
        assert isinstance(written, bool) == isinstance(given_values, bool), at


@given(config=configs())
def test_any_config_survives_json(config: Config) -> None:
    assert Config.from_dict(json.loads(config.to_json())) == config
    assert config.to_json().endswith("}\n")


@pytest.mark.parametrize("name", ["tiny", "wide", "bench", "released"])
def test_presets(name: str, tmp_path: Path) -> None:
    config = preset(name)
    (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
    assert Config.from_file(tmp_path / "config.json") == config


def test_unknown_preset_is_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match=r"'huge'.*tiny.*wide.*bench.*released"):
        preset("huge")


@pytest.mark.parametrize("name", ["tiny", "wide"])
def test_presets_are_the_fixtures(name: str) -> None:
    folder = Path(__file__).parents[1] / "golden" / name
    assert preset(name).to_dict() == Config.from_file(folder / "config.json").to_dict()


def test_a_config_without_a_tower_does_not_say_null() -> None:
    assert "vision_config" not in small_config().to_dict()


@pytest.mark.parametrize("content", ["", "{", "[1, 2", "\x00\x01", '{"text_config": }'])
def test_bad_json_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="not a JSON file") as error:
        Config.from_file(path)
    assert str(path) in str(error.value)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ValueError, match="not a JSON file") as error:
        Config.from_file(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text_config"', "{}", json.dumps(SMALL)])
def test_a_missing_text_config_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="text_config") as error:
        Config.from_file(path)
    assert str(path) in str(error.value)


def test_a_broken_rule_in_a_file_is_named_with_the_file_and_the_section(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"image_token_id": 1, "text_config": SMALL | {"hidden_size": 0}}), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Config.from_file(path)
    assert all(word in str(error.value) for word in (str(path), "text_config.hidden_size", "greater than 0"))


@pytest.mark.parametrize("field", ["vocab_size", "compress_ratios", "index_topk", "rms_norm_eps", "swiglu_limit"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError) as error:
        TextConfig.model_validate({key: value for key, value in SMALL.items() if key != field})
    assert field in str(error.value)
    assert "required" in str(error.value)


def test_another_model_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_type = 'deepseek_v4'.*'deepseek_v41'"):
        Config.from_dict({"model_type": "deepseek_v4", "image_token_id": 1, "text_config": SMALL})


# --- the release -----------------------------------------------------------------------------------------------------


def test_released_text_is_what_section_1_says() -> None:
    text = released().text
    said = dict(
        vocab_size=129280, hidden_size=5120, num_hidden_layers=40, num_attention_heads=64, head_dim=512,
        qk_rope_head_dim=64, num_key_value_heads=1, q_lora_rank=1280, o_groups=8, o_lora_rank=1024, sliding_window=128,
        moe_intermediate_size=2304, n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=6,
        scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.5,
        swiglu_limit=10.0, rms_norm_eps=1e-20, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
        max_position_embeddings=1048576, rope_theta=10000.0, compress_rope_theta=160000.0,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20, 0, 0, 0),
        kv_source_layer_ids=(2, 8, 14, 20), index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_n_heads=32, index_head_dim=128, index_topk=512,
        candidate_source_layer_id=20, candidate_topk_blocks=2048, candidate_block_size=8,
        engram_layer_ids=(1, 14), engram_num_embeddings=(384006168, 384016682), engram_max_ngram_size=4,
        engram_vocab_size=16000000, engram_n_heads=8, engram_head_dim=256, engram_pad_token_id=2,
        engram_compressed_vocab_size=99092,
        num_nextn_predict_layers=3, dspark_block_size=5, dspark_noise_token_id=128799,
        dspark_target_layer_ids=(37, 38, 39), dspark_markov_rank=256,
        dspark_n_routed_experts=128, dspark_num_experts_per_tok=3,
    )  # fmt: skip
    assert {field: getattr(text, field) for field in said} == said
    assert len(text.compress_ratios) == 43
    assert text.rope_scaling is not None
    yarn = dict(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
    assert {field: getattr(text.rope_scaling, field) for field in yarn} == yarn


def test_released_vision_and_tokens_are_what_section_1_says() -> None:
    config, written = released(), released().to_dict()
    assert config.vision is not None
    said = dict(
        num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816, patch_size=14,
        rope_theta=10000.0, downsample_ratio=3, max_image_tokens=1024, min_pixels=295936,
    )  # fmt: skip
    assert {field: getattr(config.vision, field) for field in said} == said
    assert config.image_token_id == 129264
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (0, 1, 2)
    assert written["quantization_config"] == {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
        "expert_dtype": "fp4",
    }


def test_the_package_offers_what_it_says() -> None:
    assert all(hasattr(v41lib, name) for name in v41lib.__all__)
