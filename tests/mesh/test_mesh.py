"""Test models sharded over devices: layout of parameters, and the same logits and
text.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.devices import Exchange, exchanges
from stree_jax.cli.main import main
from stree_jax.models import AttentionConfig, MambaConfig, param_shapes
from stree_jax.models.base.shards import (
    VOCAB,
    WHOLE,
    Run,
    part_slices,
    part_width,
    run_width,
)
from stree_jax.models.configs.mamba2 import mamba_params
from stree_jax.models.sharding.devices import axes_named, make_mesh
from stree_jax.models.sharding.parts import cut_at, cut_of, part_config
from stree_jax.models.stack.param_table import param_table
from tests.support.families import FAMILIES

ROOT = Path(__file__).parents[2]
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def results():
    """Returns the results of a process with eight devices."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.mesh.eight"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@families
@pytest.mark.parametrize("n", [2, 4, 8])
def test_runs_match_the_shapes_of_parameters(family, n):
    """Runs fill the axis of the whole parameter, and their parts fill that of a
    shard."""
    config = FAMILIES[family]
    cut = cut_of(config, n)
    table = param_table(part_config(config, cut))
    parts = {path: entry.param.shape for path, entry in table.items()}
    for path, shape in param_shapes(config).items():
        param, times = cut_at(config, cut, path)
        if param is None:
            assert parts[path] == shape
            continue
        assert run_width(param.runs) == shape[param.axis], path
        # Part_config does not change the `width` that sizes them
        if path[-1] in ("linear", "eh_proj"):
            continue
        wide = list(shape)
        wide[param.axis] = part_width(param.runs, times)
        assert parts[path] == tuple(wide), path


def test_parts_of_a_run_are_in_order():
    runs = (Run(8, 4), Run(6, 2, repeats=True))
    places = np.arange(14)

    def part(i, n):
        return np.concatenate([places[s] for s in part_slices(runs, i, n)]).tolist()

    assert part(0, 4) == [0, 1, 8, 9, 10]
    assert part(3, 4) == [6, 7, 11, 12, 13]
    assert part(1, 2) == [4, 5, 6, 7, 11, 12, 13]
    assert not Run(8, 4).divides(8) and runs[1].divides(8) and not runs[1].divides(3)


def test_heads_are_placed_with_their_groups():
    """Each shard has the groups that its heads read."""
    config = MambaConfig(8, 2, 3, n_groups=4)
    into = mamba_params(config, 5)["in_proj"].runs
    # Rows of in_proj, each marked with its head, or with its group for B and C.
    z, x = np.repeat(np.arange(8), 2), np.repeat(np.arange(8), 2)
    group = np.repeat(np.arange(4), 3)
    rows = np.concatenate([z, x, 10 + group, 20 + group, np.arange(8)])
    for n in (2, 4, 8):
        for i in range(n):
            own = np.concatenate([rows[s] for s in part_slices(into, i, n)])
            heads = own[own < 10]
            wanted = np.unique(heads // 2)  # 8 heads, 4 groups
            np.testing.assert_array_equal(np.unique(own[own >= 20]) - 20, wanted)
            first = i * 8 // n
            assert np.unique(heads).tolist() == [*range(first, first + 8 // n)]


def test_indivisible_layers_are_not_split():
    config = FAMILIES["bamba"]
    assert cut_of(config, 3) == WHOLE
    odd = config.with_mixers(attention=AttentionConfig(6, 2, 4))
    assert [cut_of(odd, 4).of(name) for name in ("attention", "mamba")] == [1, 4]
    assert cut_of(replace(config, vocab_size=63, num_tokens=61), 2).of(VOCAB) == 1
    groups = config.with_mixers(mamba=MambaConfig(12, 4, 8, n_groups=3))
    assert [cut_of(groups, n).of("mamba") for n in (2, 3)] == [1, 3]
    assert cut_of(groups, 6).of("mamba") == 6  # two shards share a group


@families
def test_logits_and_text_match_one_device(results, family):
    assert results["families"][family]


@families
def test_abstract_model_predicts_shards(results, family):
    assert results["shapes"][family]


def test_indivisible_heads_are_copied(results):
    told = results["uneven"]
    assert told["same"]
    assert "mamba" not in told["cut"] and told["cut"]["mlp"] == 3


def test_inside_jit(results):
    assert results["in_jit"]


def test_communication_of_a_step(results):
    """One sum for each mixer or MLP and one for embeddings, the means of the gated
    norm, and the logits. Conditions and weights are never exchanged."""
    told, config = results["program"], FAMILIES["falcon-h1"]
    rows, nodes = 4, 13
    width = rows * nodes * config.d_model * 4
    logits = rows * nodes * config.vocab_size * 4
    kinds = {(kind, size): times for kind, times, size, _ in told["exchanges"]}
    means = rows * nodes * 4 * 4  # from four shards
    both = ("all-reduce", 2 * width)  # both mixers of a layer, in one operation
    assert kinds == {
        ("all-reduce", width): 3,
        both: 2,
        ("all-gather", means): 2,
        ("all-gather", logits): 1,
    }
    assert {among for *_, among in told["exchanges"]} == {4}
    assert told["conditions"] == 0


@pytest.mark.parametrize(
    "groups",
    ["{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "mesh['data'=2,'model'=4] {'model'}"],
)
def test_replica_groups_are_parsed(groups):
    """jax 0.10 writes lists or counts, jax 0.11 writes mesh axes."""
    line = (
        f"  %sum = f32[4,2]{{1,0}} all-reduce(%x), replica_groups={groups}, to_apply=%f"
    )
    assert exchanges(f"body {{\n{line}\n}}\n") == [Exchange("all-reduce", 1, 32, 4)]


def test_bytes_per_device(results):
    whole, part = results["held"]["state"]
    assert part == whole / 8  # rows over 2, heads over 4
    whole, part = results["held"]["weights"]
    assert part < whole / 3  # norms, and B and C of shared groups, are copied


def test_planned_bytes_are_those_of_each_device(results):
    assert len(results["planned"]) == 6
    for name, (told, held) in results["planned"].items():
        assert told == held, name


def test_a_plan_for_a_model_on_a_mesh_divides_it_as_it_is(results):
    for told, held in results["planned_as_divided"]:
        assert told == held


def test_a_limit_on_a_mesh(results):
    """The programs that were compiled for the check are those that run."""
    told = results["limited"]
    assert told["same"]
    assert told["compiled"]["advance"] == told["compiled"]["init_decoding"] == 1


def test_a_server_on_a_mesh_within_a_limit(results):
    told = results["served_within"]
    assert told["all"] == [4, 256, 10**6]
    rows, context, prefixes = told["less"]
    assert rows in (2, 4) and (rows, context, prefixes) != (4, 256, 10**6)
    assert told["nothing"].startswith("memory: 0.00 MB are ")
    assert told["bytes"][0] == told["bytes"][1] == told["after"]
    # The programs that were compiled for the check are those that run.
    assert told["compiled"] and not {"admit", "advance"} & set(told["compiled"])


def test_a_server_on_a_mesh_has_the_same_texts(results):
    told = results["served"]
    assert told["same"] == [True] * 4
    assert told["cached"][:4] == [0] * 4 and min(told["cached"][5:7]) >= 32


def test_taps_on_a_mesh(results):
    """Every device has the whole residual stream."""
    told = results["tapped"]
    assert told["same"] and told["away"] < 1e-5
    assert min(told["count"]) > 2  # the prompts and some accepted tokens


def test_block_drafters_work(results):
    assert results["blocks"] == {"same": True, "auto": True}


def test_the_table_of_bench_devices(results):
    two, four = results["counted"]["rows"]
    assert 0.45 < four["weight_bytes"] / two["weight_bytes"] < 0.55
    assert sum(n for kind, n, *_ in two["exchanges"] if kind == "all-reduce") == 25
    assert two["largest_gather_bytes"] < two["largest_weight_bytes"] / 100
    lines = results["counted"]["table"].splitlines()
    assert sum(line.startswith("| hybrid-130m | model=") for line in lines) == 2


def test_unsupported_uses_of_meshes_are_refused(results):
    told = results["refusals"]
    assert "unknown axis 'rows'" in told["axis"]
    assert "model=7" in told["size"] and "2, " in told["size"]
    assert "int8" in told["int8"]
    assert "already" in told["again"]
    for name in ("drafter", "alone"):
        assert told[name].startswith("drafter: ")
    assert told["memory"].startswith("memory: ")
    assert told["past"].startswith("past: ")
    assert all("\n" not in words for words in told.values())


@pytest.mark.parametrize("text", ["rows=2", "model", "model=x", "model=2,model=2", ""])
def test_invalid_meshes_are_refused(text):
    with pytest.raises(ValueError, match="mesh: want data=N"):
        axes_named(text)
    with pytest.raises(ValueError, match="at least 1"):
        axes_named("data=0")


def test_too_few_devices_are_reported():
    with pytest.raises(ValueError, match="is 4 devices, there are 1; JAX_NUM_CPU_DEV"):
        make_mesh("data=2,model=2")


@pytest.mark.parametrize(
    "words",
    [
        ["--mesh", "model=2"],
        ["--mesh", "m=2"],
        ["--processes", "2", "--mesh", "model=2"],
    ],
)
def test_command_errors_are_one_line(words, capsys):
    assert main(["generate", "a", *words]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and out == ""


def test_the_command_runs_on_a_mesh(capsys):
    words = ["--mesh", "data=1,model=1", "--drafter", "none", "--max-new-tokens", "3"]
    assert main(["generate", "def f(", *words]) == 0
    assert capsys.readouterr().out.startswith("def f(")


@pytest.mark.parametrize("axes", ["data=1,model=1", "data=1", "model=1"])
def test_a_mesh_of_one_device(axes):
    from stree_jax import generate, shard
    from tests.support.tiny import tiny

    model = tiny(1)
    alone = generate(model, [[9, 8, 7]], max_new_tokens=4, drafter=None).tokens
    mesh = make_mesh(axes)
    assert (
        generate(shard(model, mesh), [[9, 8, 7]], max_new_tokens=4, drafter=None).tokens
        == alone
    )
