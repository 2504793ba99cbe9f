"""Test which files are downloaded from a hub repository: only those that `load` opens.

The hub is a local server (`tests/support/hub_server.py`).
"""

import json
import shutil

import gguf
import jax
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.checkpoints.kinds.ngrams import save_ngrams
from stree_jax.cli import main as cli
from stree_jax.models.drafters.heads import Heads, HeadsConfig, init_heads
from stree_jax.training.ngrams import count_grams, katz
from tests.support.adapters import write
from tests.support.hub_server import served
from tests.support.published_drafters import write_drafter
from tests.support.table_models import (
    byte_level,
    follow,
    padded_size,
    write_gguf,
    write_llama,
)

BESIDE = (  # other files in published repositories; `load` opens none of them
    *("README.md", ".gitattributes", "LICENSE", "USE_POLICY.md", "optimizer.bin"),
    *("training_args.bin", "consolidated.safetensors", "consolidated.00.pth"),
    *("original/consolidated.00.pth", "original/params.json", "params.json"),
    *("original/tokenizer.model", "onnx/model.onnx", "onnx/model_q4.onnx"),
    *("onnx/config.json", "onnx/model.safetensors", "tf_model.h5", "rust_model.ot"),
    *("flax_model.msgpack", "coreml/model.mlpackage", "pytorch_model.bin", "vocab.txt"),
    *("model.fp16.safetensors", "adapter_model.safetensors", "scheduler.pt"),
    *("global_step10/mp_rank_00_model_states.pt", "trainer_state.json", "eval.json"),
    *("modeling_llama.py", "model-Q4_K_M.gguf", "runs/events.out", "figure.png"),
    *("checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt", "quant.bin"),
)
SMALL = ["config.json", "generation_config.json", "tokenizer.json"]
SMALL += ["tokenizer_config.json", "chat_template.jinja"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Writes a model that says "ab" after "!", as a directory and as a GGUF file."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), byte_level()
    chain = follow(tokenizer, ["!", "ab", "</s>"], rest=2)
    write_llama(
        folder / "llama", padded_size(tokenizer), tokenizer=tokenizer, chain=chain
    )
    (folder / "llama/generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "llama/tokenizer_config.json").write_text("{}")
    (folder / "llama/chat_template.jinja").write_text("{{ messages[0].content }}")
    kinds = {"</s>": gguf.TokenType.CONTROL}
    write_gguf(folder / "model.gguf", tokenizer, chain, eos="</s>", kinds=kinds)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with served(tmp_path / "hub") as (found, address):
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield found


def put(hub, models, name="o/llama", beside=BESIDE):
    """Adds a repository to the hub, with other files beside the model's."""
    repo = hub.folder / name
    shutil.copytree(models / "llama", repo)
    for file in beside:
        (repo / file).parent.mkdir(parents=True, exist_ok=True)
        (repo / file).write_bytes(b"not read" * 100)
    return repo


def in_shards(repo):
    tensors = load_file(repo / "model.safetensors")
    (repo / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for i, some in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, repo / file)
        where |= dict.fromkeys(some, file)
    index = json.dumps({"weight_map": where})
    (repo / "model.safetensors.index.json").write_text(index)


def text(model):
    return stree_jax.generate(model, "!", max_new_tokens=4, drafter=None).texts


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    return code, *capsys.readouterr()


def refused(name):
    with pytest.raises(stree_jax.CheckpointError) as error:
        stree_jax.load(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_load_downloads_one_weights_file(hub, models):
    put(hub, models)
    assert text(stree_jax.load("o/llama")) == ["ab"]
    assert hub.files() == sorted([*SMALL, "model.safetensors"])


def test_load_downloads_the_shards_in_the_index(hub, models):
    repo = put(hub, models)
    in_shards(repo)
    (repo / "model-00001-of-00003.safetensors").write_bytes(b"of an older upload")
    assert text(stree_jax.load("o/llama")) == ["ab"]
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert hub.files() == sorted([*SMALL, *shards, "model.safetensors.index.json"])


def pickled(repo, **options):
    """Replaces the weights of a repository by a PyTorch file, and returns its path."""
    torch = pytest.importorskip("torch")
    tensors = load_file(repo / "model.safetensors")
    for file in repo.glob("*.safetensors"):
        file.unlink()
    tensors = {k: torch.tensor(v) for k, v in tensors.items()}
    torch.save(tensors, repo / "pytorch_model.bin", **options)
    return repo / "pytorch_model.bin"


def test_pytorch_weights_are_used_if_there_are_no_others(hub, models, capsys):
    """`info` and `plan` download only the list of tensors of a PyTorch (zip) file."""
    file = pickled(put(hub, models))
    facts = info("o/llama")
    assert facts["layers"] == {"attention": 2, "mlp": 2} and not facts["tied_head"]
    code, out, err = run(capsys, "plan", "--model", "o/llama", "--memory", "1GB")
    assert code == 0, err
    pieces = [count for _, name, count in hub.sent if name == file.name]
    assert max(pieces) <= 2**18 and sum(pieces) < file.stat().st_size
    assert text(stree_jax.load("o/llama")) == ["ab"]
    assert hub.files() == sorted([*SMALL, "pytorch_model.bin"])
    assert info("o/llama") == facts


def test_old_pytorch_files_are_downloaded_whole(hub, models, capsys):
    """In files from before PyTorch 1.6, the list of tensors is not stored
    separately."""
    pickled(put(hub, models), _use_new_zipfile_serialization=False)
    code, out, err = run(capsys, "plan", "--model", "o/llama", "--memory", "1GB")
    assert code == 0, err
    assert info("o/llama")["parameters"] == info(hub.folder / "o/llama")["parameters"]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_info_finds_an_untied_output_head(hub, models, apart, shards):
    """The config says that the head is tied; `info` compares a few values of both
    tensors."""
    repo = put(hub, models)
    tensors = load_file(repo / "model.safetensors")
    if not apart:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
    save_file(tensors, repo / "model.safetensors")
    config = json.loads((repo / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (repo / "config.json").write_text(json.dumps(config))
    if shards:
        in_shards(repo)
    assert info("o/llama")["tied_head"] == (not apart) == info(repo)["tied_head"]


def info_refused(name):
    with pytest.raises(stree_jax.CheckpointError) as error:
        info(name)
    return str(error.value)


def test_directories_of_this_library(hub, models):
    stree_jax.save(stree_jax.load(models / "llama"), hub_folder(hub) / "ours")
    assert info("o/ours")["format"] == "stree-jax"
    assert hub.files() == ["config.json", "tokenizer.json"]
    assert text(stree_jax.load("o/ours")) == ["ab"]


def hub_folder(hub):
    (hub.folder / "o").mkdir(parents=True, exist_ok=True)
    return hub.folder / "o"


@pytest.mark.parametrize("shards", [False, True])
def test_info_and_plan_fetch_no_weights(hub, models, capsys, shards):
    """Their output is the same as for a local directory."""
    repo = put(hub, models)
    if shards:
        in_shards(repo)
    here, there = info(repo), info("o/llama")
    assert there.pop("path") == "o/llama" and here.pop("path") and here == there
    code, out, err = run(capsys, "info", "o/llama", "--json")
    assert code == 0 and json.loads(out)["parameters"] == here["parameters"], err
    for command in (["--memory", "1GB"], ["--memory", "1GB", "--drafter", "o/llama"]):
        code, out, err = run(capsys, "plan", "--model", "o/llama", *command)
        assert code == 0, err
    assert hub.bytes_of("r.safetensors") == 0
    size = here["weight_bytes"]
    assert hub.bytes_of(".safetensors") < 2**18 * 8 < size
    assert not [file for file in hub.files() if file.endswith((".bin", ".gguf"))]


def test_an_unknown_architecture_downloads_no_weights(hub, models):
    repo = put(hub, models)
    config = json.loads((repo / "config.json").read_text()) | {"model_type": "gpt2"}
    (repo / "config.json").write_text(json.dumps(config))
    assert "model_type: 'gpt2' is not supported" in refused("o/llama")
    assert hub.bytes_of(".safetensors") == 0


def test_load_downloads_one_gguf_file(hub, models):
    shutil.copy(models / "model.gguf", hub_folder(hub) / "model.gguf")
    repo = hub.folder / "o/gguf"
    repo.mkdir()
    shutil.copy(models / "model.gguf", repo / "tiny-Q8_0.gguf")
    (repo / "mmproj-F16.gguf").write_bytes(b"a projector of images")
    (repo / "tiny-Q8_0.imatrix.gguf").write_bytes(b"what it was quantized by")
    (repo / "config.json").write_text("{}")
    assert info("o/gguf")["format"] == "gguf llama"
    assert hub.files() == ["tiny-Q8_0.gguf"]
    assert text(stree_jax.load("o/gguf")) == ["ab"]
    assert hub.files() == ["tiny-Q8_0.gguf"]


QUANTS = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny-IQ4_XS.gguf", "tiny-f16.gguf")


@pytest.fixture
def quantizations(hub, models):
    """Adds a repository of several quantizations, one in a folder. Only two can be
    read."""
    repo = hub.folder / "o/gguf"
    (repo / "Q6_K").mkdir(parents=True)
    for file in (*QUANTS, "Q6_K/tiny-Q6_K.gguf"):
        (repo / file).write_bytes(b"GGUF but no more")
    for file in (QUANTS[0], "Q6_K/tiny-Q6_K.gguf"):
        shutil.copy(models / "model.gguf", repo / file)
    return hub


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("o/gguf:Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("o/gguf:q4_k_m", "tiny-Q4_K_M.gguf"),
        ("o/gguf/tiny-Q4_K_M.gguf", "tiny-Q4_K_M.gguf"),
        ("o/gguf:Q6_K", "Q6_K/tiny-Q6_K.gguf"),
        ("o/gguf/Q6_K/tiny-Q6_K.gguf@main", "Q6_K/tiny-Q6_K.gguf"),
    ],
)
def test_a_quantization_is_chosen_by_its_name(quantizations, name, file):
    assert info(name)["format"] == "gguf llama"
    assert text(stree_jax.load(name)) == ["ab"]
    assert quantizations.files() == [file]


def test_load_downloads_all_shards_of_a_gguf_file(hub, models):
    repo, tokenizer = hub.folder / "o/gguf/Q8_0", byte_level()
    repo.mkdir(parents=True)
    chain = follow(tokenizer, ["!", "ab", "</s>"], rest=2)

    def split(writer):
        writer.split_max_tensors = 8

    kinds = {"</s>": gguf.TokenType.CONTROL}
    file = repo / "t-Q8_0.gguf"
    write_gguf(file, tokenizer, chain, eos="</s>", kinds=kinds, edit=split)
    (repo.parent / "t-Q4_0.gguf").write_bytes(b"GGUF")
    shards = sorted(f"Q8_0/{file.name}" for file in repo.iterdir())
    assert len(shards) > 2
    assert info("o/gguf:Q8_0")["layers"] == {"attention": 2, "mlp": 2}
    assert text(stree_jax.load("o/gguf:Q8_0")) == ["ab"]
    assert hub.files() == shards


def test_several_quantizations_are_listed(quantizations):
    for name in ("o/gguf", "o/gguf:Q5_K_M", "o/gguf:K_M"):
        problem = refused(name)
        assert all(file in problem for file in QUANTS)
        assert "name one, such as o/gguf/" in problem
        assert info_refused(name) == problem
    assert "no GGUF files of Q5_K_M" in refused("o/gguf:Q5_K_M")
    missing = refused("o/gguf/tiny-Q2_K.gguf")
    assert "o/gguf: no file tiny-Q2_K.gguf" in missing
    assert all(file in missing for file in QUANTS)
    assert not quantizations.files()


def test_a_revision_is_chosen_by_its_name(hub, models):
    put(hub, models)
    old = put(hub, models, "o/llama@v1", ())
    config = json.loads((old / "config.json").read_text()) | {"eos_token_id": 7}
    (old / "config.json").write_text(json.dumps(config))
    (old / "generation_config.json").unlink()
    assert stree_jax.load("o/llama").config.stop_tokens == (2,)
    assert stree_jax.load("o/llama@v1").config.stop_tokens == (7,)
    assert "the repository has no such revision" in refused("o/llama@v2")


def test_offline_loads_use_the_cache(hub, models, monkeypatch):
    """Cached files are enough; the error names a file that is missing in the cache."""
    repo = put(hub, models)
    in_shards(repo)
    shutil.copytree(models / "llama", hub.folder / "o/other")
    loaded = text(stree_jax.load("o/llama"))
    info("o/other")
    sent = len(hub.sent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert text(stree_jax.load("o/llama")) == loaded
    assert info("o/llama")["layers"] == {"attention": 2, "mlp": 2}
    assert "o/other: no weights in the cache (HF_HUB_OFFLINE is set" in refused(
        "o/other"
    )
    (shard,) = (repo.parents[2] / "cache").glob("*/snapshots/*/model-00002*")
    shard.unlink()
    problem = refused("o/llama")
    assert "model-00002-of-00002.safetensors is not in the cache" in problem
    assert "HF_HUB_OFFLINE is set" in refused("o/unknown")
    assert len(hub.sent) == sent


def test_errors_of_the_hub_are_explained(hub, models):
    put(hub, models)
    hub.gated.add("o/llama")
    assert "accept the terms" in refused("o/llama")
    assert "no such repository; a private one needs hf auth login" in refused("o/none")
    (hub.folder / "o/empty").mkdir()
    (hub.folder / "o/empty/README.md").write_text("soon")
    assert "o/empty: no weights; want model.safetensors" in refused("o/empty")
    (hub.folder / "o/lora").mkdir()
    (hub.folder / "o/lora/adapter_model.safetensors").write_bytes(b"")
    assert "o/lora: the repository has no config.json" in refused("o/lora")
    assert refused("models/absent.gguf") == "models/absent.gguf: no such file"
    assert "no such file, and not available" in refused("o/none/model-Q8_0.gguf")


def test_an_adapter_is_downloaded(hub, models, tmp_path):
    """Only its config and its weights are."""
    tensors = load_file(put(hub, models) / "model.safetensors")
    new = {"model.norm.weight": 2 * tensors["model.norm.weight"]}
    adapter = write(hub.folder / "o/lora", {}, new, modules_to_save=["norm"])
    for file in ("README.md", "optimizer.pt", "tokenizer.json"):
        (adapter / file).write_bytes(b"not read")
    found = stree_jax.load("o/llama", adapter="o/lora").params["norm"]["scale"]
    np.testing.assert_array_equal(found, new["model.norm.weight"])
    assert not list((tmp_path / "cache").rglob("optimizer.pt"))
    assert list((tmp_path / "cache").rglob("adapter_config.json"))


def test_draft_models_heads_and_ngrams_are_downloaded(hub, models, capsys, tmp_path):
    """Each is named by hub id, like the target, and only its own files are
    downloaded."""
    put(hub, models, "o/drafter")
    repo = put(hub, models)
    width = json.loads((repo / "config.json").read_text())["hidden_size"]
    config = HeadsConfig(width, width, 2, 1)
    heads = Heads(init_heads(config, jax.random.key(0), "float32"), config)
    stree_jax.save_drafter(heads, hub.folder / "o/heads")
    (hub.folder / "o/heads/optimizer.bin").write_bytes(b"not read")
    (hub.folder / "o/heads/model.safetensors").write_bytes(b"not read either")
    table = katz(
        count_grams(np.arange(width)[None] * 7 % width, 2, width),
        width,
        slots=64,
        keep=1,
    )
    save_ngrams(table, hub.folder / "o/heads/n-grams.safetensors")
    for drafter in ("o/drafter", "o/heads", "o/heads/n-grams.safetensors"):
        args = "--model", "o/llama", "--drafter", drafter, "--tree", "chain:2"
        code, out, err = run(
            capsys, "generate", "!", *args, "--max-new-tokens", 4, "--json"
        )
        assert code == 0 and json.loads(out)["text"] == "ab", err
    assert hub.files("o/heads") == [
        "config.json",
        "medusa_lm_head.safetensors",
        "n-grams.safetensors",
    ]
    assert hub.files("o/drafter") == sorted([*SMALL, "model.safetensors"])


def test_published_drafters_are_downloaded(hub, models, capsys):
    """For a description only their headers are."""
    fields = json.loads((put(hub, models) / "config.json").read_text())
    sizes = dict(d=fields["hidden_size"], vocab=fields["vocab_size"])
    layers = fields["num_hidden_layers"]
    boundaries = dict(target_layers=layers, boundaries=tuple({0, layers}))
    write_drafter(hub.folder / "o/spark", "liquid", **sizes, **boundaries, hidden=4096)
    (hub.folder / "o/spark/dspark.py").write_text("not read")
    code, out, err = run(capsys, "info", "o/spark", "--json")
    assert code == 0 and json.loads(out)["format"] == "DSpark", err
    file = hub.folder / "o/spark/model.safetensors"
    assert hub.bytes_of("model.safetensors") < file.stat().st_size
    args = "--model", "o/llama", "--drafter", "o/spark", "--max-new-tokens", 4, "--json"
    code, out, err = run(capsys, "generate", "!", "--tree", "chain:2", *args)
    assert code == 0 and json.loads(out)["text"] == "ab", err
    assert hub.files("o/spark") == ["config.json", "model.safetensors"]
    (hub.folder / "o/spark/mask_embedding.pt").write_text("not read")
    with pytest.raises(stree_jax.CheckpointError, match=r"mask_embedding.pt is a pick"):
        stree_jax.load_drafter("o/spark")


def test_convert_and_export_take_hub_ids(hub, models, capsys, tmp_path):
    put(hub, models)
    assert run(capsys, "convert", "o/llama", tmp_path / "ours")[0] == 0
    assert text(stree_jax.load(tmp_path / "ours")) == ["ab"]
    assert run(capsys, "export", "o/llama", tmp_path / "back")[0] == 0
    assert text(stree_jax.load(tmp_path / "back")) == ["ab"]
    assert hub.files() == sorted([*SMALL, "model.safetensors"])
