"""The optimisers: what they do to a matrix, who owns which parameter, resume, and agreement under FSDP2."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from pydantic import ValidationError
from torch import nn

from tests.unit.support import small_config, tokens
from v41lib import Model
from v41lib.config import preset
from v41lib.training.optim import (
    Muon,
    Optimisers,
    OptimSettings,
    SinkhornMomentum,
    balance,
    group_parameters,
    optimisers,
    orthogonalise,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    return x.square().mean().sqrt() if dim is None else x.square().mean(dim).sqrt()


def stepped(kind: type, *gradients: torch.Tensor, start: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
    """Where ``gradients`` take a parameter, from zero unless ``start`` is given."""
    parameter = nn.Parameter(torch.zeros_like(gradients[0]) if start is None else start.clone())
    group = {"params": [parameter], **settings}
    optimiser = kind([group])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimiser.step()
    return parameter.detach()


# --- orthogonalise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (3, 24, 16), (2, 3, 16, 24), (1, 5), (200, 48, 40)])
def test_singular_values_are_near_one_and_the_singular_vectors_stay(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    u, s, v = torch.linalg.svd(orthogonalise(x), full_matrices=False)
    assert s.min() > 0.6 and s.max() < 1.3
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    # u v is the orthogonal factor, which the odd polynomial keeps.
    assert torch.allclose(u @ v, left @ right, atol=2e-3)


def test_a_batch_is_its_matrices() -> None:
    x = random(70, 96, 64)
    assert torch.allclose(orthogonalise(x), torch.stack([orthogonalise(matrix) for matrix in x]), atol=1e-5)


def test_scale_does_not_matter_and_zeros_stay() -> None:
    x = random(8, 6)
    assert torch.allclose(orthogonalise(x), orthogonalise(1e-3 * x), atol=1e-4)
    assert not orthogonalise(torch.zeros(2, 8, 6)).any()
    assert orthogonalise(x.bfloat16()).dtype == torch.bfloat16


# --- Muon ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_agrees_with_torch(shape: tuple[int, int]) -> None:
    gradients, start = [random(*shape, seed=seed) for seed in range(4)], random(*shape, seed=9)
    ours = stepped(Muon, *gradients, start=start, lr=0.1, weight_decay=0.2)
    settings = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    theirs = stepped(torch.optim.Muon, *gradients, start=start, **settings)
    moved, expected = ours - start, theirs - start
    assert torch.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.999
    assert math.isclose(rms(moved), rms(expected), rel_tol=0.01)


@pytest.mark.parametrize("shape", [(32, 12), (12, 32), (4, 12, 32)])
def test_an_update_has_the_rms_of_an_adamw_step(shape: tuple[int, ...]) -> None:
    assert math.isclose(rms(stepped(Muon, random(*shape), lr=0.5)), 0.2 * 0.5, rel_tol=0.2)


def test_heads_and_experts_are_orthogonalised_one_by_one() -> None:
    gradients = [random(24, 8, seed=seed) for seed in range(3)]
    together = stepped(Muon, *gradients, heads=3)
    apart = [stepped(Muon, *(gradient[rows : rows + 8] for gradient in gradients)) for rows in (0, 8, 16)]
    assert torch.allclose(together, torch.cat(apart), atol=1e-6)
    assert not torch.allclose(together, stepped(Muon, *gradients), atol=1e-3)
    experts = stepped(Muon, *(gradient.unflatten(0, (3, 8)) for gradient in gradients))
    assert torch.allclose(experts.flatten(0, 1), together, atol=1e-6)


def test_parameters_of_one_size_share_a_batch_and_nothing_else() -> None:
    shapes = [(8, 6), (6, 8), (8, 6), (2, 8, 6), (8, 6)]
    parameters = [nn.Parameter(random(*shape, seed=n)) for n, shape in enumerate(shapes)]
    before = [parameter.detach().clone() for parameter in parameters]
    for n, parameter in enumerate(parameters[:-1]):
        parameter.grad = random(*parameter.shape, seed=10 + n)
    Muon(parameters, lr=0.3).step()
    for n, (parameter, start) in enumerate(zip(parameters[:-1], before, strict=False)):
        alone = stepped(Muon, random(*parameter.shape, seed=10 + n), start=start, lr=0.3)
        assert torch.allclose(parameter, alone, atol=1e-6)
    assert torch.equal(parameters[-1], before[-1])  # it has no gradient


@pytest.mark.parametrize(("shape", "heads"), [((4,), 1), ((2, 2, 2, 2), 1), ((6, 4), 4), ((2, 4, 4), 2), ((6, 4), 0)])
def test_muon_refuses_what_it_cannot_split(shape: tuple[int, ...], heads: int) -> None:
    with pytest.raises(ValueError, match="a parameter is"):
        Muon([nn.Parameter(torch.zeros(shape))], heads=heads)


# --- balanced momentum -----------------------------------------------------------------------------------------------


def skewed(rows: int = 40, columns: int = 12) -> torch.Tensor:
    """No zeros, and rows and columns of very different size."""
    scales = torch.logspace(-3, 2, rows).unsqueeze(-1) * torch.logspace(1, -2, columns)
    return random(rows, columns).sign() * (random(rows, columns, seed=1).abs() + 0.1) * scales


def test_rows_and_columns_are_balanced() -> None:
    balanced = balance(skewed())
    assert torch.allclose(rms(balanced, 1), torch.ones(40), atol=0.01)
    assert torch.allclose(rms(balanced, 0), torch.ones(12), atol=0.01)
    assert torch.equal(balanced.sign(), skewed().sign())
    assert not torch.allclose(rms(balance(skewed(), 1), 1), torch.ones(40), atol=0.01)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e6])
def test_balance_does_not_depend_on_scale(factor: float) -> None:
    assert torch.allclose(balance(skewed() * factor), balance(skewed()), rtol=1e-4)


def test_zero_rows_and_columns_stay_and_do_not_count() -> None:
    x = skewed()
    x[::4] = 0
    balanced = balance(x)
    assert not balanced[::4].any()
    assert torch.allclose(balanced[1::4], balance(x[x.any(-1)])[::3], atol=1e-5)
    assert math.isclose(rms(balanced[x.any(-1)]), 1, rel_tol=0.01)
    x[:, 5] = 0
    assert not balance(x)[:, 5].any() and balance(x).isfinite().all()
    assert not balance(torch.zeros(4, 3)).any()


def test_balanced_momentum_by_hand() -> None:
    first, second, start = random(20, 6), random(20, 6, seed=1), random(20, 6, seed=2)
    first[3], second[3] = 0, 0
    moved = stepped(SinkhornMomentum, first, second, start=start, lr=0.1, weight_decay=0.5)
    by_hand = start * 0.95 - 0.02 * balance(first)
    by_hand = by_hand * 0.95 - 0.02 * balance(0.95 * first + second)
    assert torch.allclose(moved, by_hand, atol=1e-6)
    assert torch.allclose(moved[3], start[3] * 0.95**2)  # never seen: it only decays
    with pytest.raises(ValueError, match="a parameter is"):
        SinkhornMomentum([nn.Parameter(torch.zeros(4))])


# --- groups and settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "wide"])
def test_every_trainable_parameter_is_in_one_group(name: str) -> None:
    model = Model(preset(name), device="meta")
    groups = group_parameters(model)
    names = [name for members in groups.values() for name, _ in members]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert all(groups.values()) and not any("bias" in name for name in names)
    found = {
        name: {n.removeprefix(f"layers.{n.split('.')[1]}.") for n, _ in members} for name, members in groups.items()
    }
    assert found["queries"] == {"attn.wq_b.weight"} and len(groups["queries"]) == len(model.layers)
    assert found["embedding"] == {"embed.weight"} and found["head"] == {"head.weight"}
    attention = {f"attn.{n}.weight" for n in ("wq_a", "wkv", "wo_a", "wo_b", "compressor.wkv", "compressor.wgate")}
    experts = {f"ffn.experts.w{n}" for n in (1, 2, 3)} | {f"ffn.shared_experts.w{n}.weight" for n in (1, 2, 3)}
    assert found["hidden"] == attention | experts
    assert all(".attn.indexer." in f".{n}" for n in found["indexer"])
    assert {"ffn.gate.weight", "hc_attn.fn", "hc_ffn.scale", "attn.attn_sink", "norm.weight"} <= found["small"]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, [Muon, SinkhornMomentum, torch.optim.AdamW]),
        ({"hidden": "adamw"}, [SinkhornMomentum, torch.optim.AdamW]),
        ({"embedding": "adamw", "queries": "whole"}, [Muon, torch.optim.AdamW]),
        ({"hidden": "adamw", "embedding": "adamw"}, [torch.optim.AdamW]),
    ],
)
def test_the_optimisers_own_every_parameter_once(changes: dict[str, Any], kinds: list[type]) -> None:
    model = Model(small_config())
    members = optimisers(model, OptimSettings(**changes, weight_decay=0.1))
    assert [type(member) for member in members] == kinds
    owned = [id(p) for member in members for group in member.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    if Muon in kinds:
        assert members[0].param_groups[0]["heads"] == (1 if changes.get("queries") == "whole" else 2)
    decays = {id(p): g["weight_decay"] for member in members for g in member.param_groups for p in g["params"]}
    assert decays[id(model.norm.weight)] == 0 and decays[id(model.embed.weight)] == 0.1


@pytest.mark.parametrize("wrong", [{"hidden": "sgd"}, {"lr_hidden": 0}, {"momentum": 1}, {"unknown": 1}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptimSettings.model_validate(wrong)


# --- together --------------------------------------------------------------------------------------------------------


def train(model: Model, optimiser: Optimisers, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimiser.set_rate(1 / (1 + step))
        ids = tokens(12, batch=2, seed=step % 2)
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path: Path) -> None:
    model = Model(small_config())
    optimiser = Optimisers(optimisers(model))
    losses = train(model, optimiser, range(5))
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, tmp_path / "state.pt")
    losses += train(model, optimiser, range(5, 10))
    assert losses[-1] < losses[0] - 0.5

    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = Model(small_config(), seed=1)
    resumed.load_state_dict(saved["model"])
    again = Optimisers(optimisers(resumed))
    again.load_state_dict(saved["optimiser"])
    train(resumed, again, range(5, 10))
    for (name, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name

    forgetful = Model(small_config())
    forgetful.load_state_dict(saved["model"])
    train(forgetful, Optimisers(optimisers(forgetful)), range(5, 10))
    assert not torch.equal(forgetful.head.weight, model.head.weight)


def test_a_rate_multiplies_the_initial_one_and_survives_a_state() -> None:
    optimiser = Optimisers(optimisers(Model(small_config()), OptimSettings(lr_hidden=0.4, lr_adamw=0.2)))
    for factor in (0.5, 0.25):
        optimiser.set_rate(factor)
    state = copy.deepcopy(optimiser.state_dict())
    fresh = Optimisers(optimisers(Model(small_config())))
    fresh.load_state_dict(state)
    assert fresh.members[0].param_groups[0]["lr"] == 0.1 and fresh.members[-1].param_groups[0]["lr"] == 0.05
    fresh.set_rate(1)
    assert fresh.members[0].param_groups[1]["lr"] == 0.4
    with pytest.raises(ValueError, match="the state is of 3 optimisers"):
        Optimisers(optimisers(Model(small_config()), OptimSettings(hidden="adamw"))).load_state_dict(state)


# --- sharded ---------------------------------------------------------------------------------------------------------


def _train_sharded(rank: int, folder: str) -> None:
    """One of two processes: three steps of a sharded model, whose whole parameters and state the first one saves."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = Model(preset("tiny"))
    # As one unit: what is gathered for Model.forward also serves the cut, which runs parts of a block by themselves.
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimiser = Optimisers(optimisers(model, OptimSettings(weight_decay=0.1)))
    train(model, optimiser, range(3))
    assert isinstance(optimiser.members[0].state[model.blocks[0].ffn.experts.w1]["momentum"], DTensor)
    whole = {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.timeout(120)
def test_sharded_steps_are_the_steps(tmp_path: Path) -> None:
    processes = torch.multiprocessing.spawn(_train_sharded, (str(tmp_path),), nprocs=2, join=False)
    model = Model(preset("tiny"))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, Optimisers(optimisers(model, OptimSettings(weight_decay=0.1))), range(3))
    try:
        deadline = time.monotonic() + 60
        while not processes.join(timeout=1):  # true once all have ended; raises what one of them raised
            assert time.monotonic() < deadline, "the sharded processes hang"
    finally:
        for process in processes.processes:
            process.kill()
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole.keys() == start.keys()
    for name, parameter in model.named_parameters():
        assert torch.allclose(whole[name], parameter, rtol=0, atol=1e-5), name
    for name in ("embed.weight", "head.weight", "layers.0.attn.wq_b.weight", "layers.0.ffn.experts.w1"):
        assert not torch.allclose(whole[name], start[name], atol=1e-3), name
