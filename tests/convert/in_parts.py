"""Loads every checkpoint onto eight CPU devices, part by part, in its own process.

    python -m tests.convert.in_parts FOLDER

Prints a line of JSON with the error of every case, or "". What `load` puts on a mesh
must equal, bit for bit and shard by shard, `shard` of the model on one device.
"""

import json
import shutil
import sys
import traceback
import warnings
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

import stree_jax
from stree_jax.convert import CheckpointError
from stree_jax.convert.tensors import stored_tensors
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models import by_path
from tests.support import mtp, quantized, qwen
from tests.support.checkpoints import HF_CASES, NATIVE_CASES, granite, write_native
from tests.support.checkpoints import sources as sources_in
from tests.support.gguf_files import GGUF_CASES, write_gguf

SIX_HEADS = ("mamba2", "mamba2-tied")  # which no four devices share
OWN = ("mamba2", "granite", "granite-moe", "falcon-h1", "zamba2", "nemotron-h-latent")
EVEN = {"vocab_size": 64}
WIDE = EVEN | {  # groups of 128 columns for each of two devices
    "hidden_size": 256,
    "shared_intermediate_size": 256,
    "mamba_d_head": 32,
    "mamba_expand": 1,
}


def mesh_of(**axes):
    sizes = tuple(axes.values())
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, tuple(axes), devices=devices)


def assert_same(found, wanted):
    """Asserts that two models on a mesh are equal, device by device."""
    assert (found.config, found.cut) == (wanted.config, wanted.cut)
    assert found.mesh == wanted.mesh
    ours, theirs = by_path(found.params), by_path(wanted.params)
    assert ours.keys() == theirs.keys()
    for path in theirs:
        each = zip(*map(jax.tree.leaves, (ours[path], theirs[path])), strict=True)
        for x, y in each:
            what = (path, x.shape, y.shape, x.dtype, x.sharding, y.sharding)
            assert x.dtype == y.dtype and x.shape == y.shape, what
            assert x.sharding == y.sharding, what
            shards = zip(x.addressable_shards, y.addressable_shards, strict=True)
            for a, b in shards:
                assert a.device == b.device and a.index == b.index, what
                assert bits(a.data) == bits(b.data), (path, a.index)


def bits(array):
    return np.asarray(array).tobytes()


class Cases:
    """A method for each kind of case; a checkpoint is written once.

    Attributes:
      said: of every case what was wrong.
    """

    def __init__(self, folder):
        self.folder, self.said = folder, {}
        self.made = sources_in(folder)

    def tried(self, name, check, *args, **options):
        try:
            check(*args, **options)
            self.said[name] = ""
        except Exception:
            self.said[name] = traceback.format_exc(limit=-4)

    def same(self, path, dtype, mesh, whole=False, **options):
        one = stree_jax.load(path, dtype, **options)
        wanted = stree_jax.shard(one, mesh, whole=whole)
        with pieces_of(40):
            found = stree_jax.load(path, dtype, mesh=mesh, whole=whole, **options)
        assert_same(found, wanted)

    def ours(self, name, **options):
        """Returns a directory in our own format for a case."""
        path = self.folder / f"{name}-ours"
        if not path.exists():
            stree_jax.save(stree_jax.load(self.made(name), "float32", **options), path)
        return path

    def families(self):
        for name in HF_CASES:
            for n in (3, 6) if name == "mamba2" else (2, 4):
                if n == 4 and name in SIX_HEADS:
                    continue
                mesh = mesh_of(model=n)
                self.tried(f"{name} {n}", self.same, self.made(name), "float32", mesh)
        for name in OWN:
            n = 3 if name == "mamba2" else 4
            case = self.ours(name), "float32", mesh_of(model=n)
            self.tried(f"{name} ours {n}", self.same, *case)
        eight = mesh_of(model=8)
        self.tried("granite 8", self.same, self.made("granite"), "float32", eight)
        self.tried("granite ours 8", self.same, self.ours("granite"), "float32", eight)

    def formats(self):
        """Checks formats with special rows: swapped, in other shapes, in pairs,
        quantized."""
        two = mesh_of(model=2)
        for name, pickled in ("attention", True), ("attention-mlp", False):
            path = self.folder / f"native-{name}"
            write_native(path, pickled=pickled, **NATIVE_CASES[name])
            self.tried(f"native {name}", self.same, path, "float32", two)
        path = self.made("mambainllama")
        self.tried("mambainllama", self.same, path, "float32", two)
        for name in ("granite-hybrid-moe", "nemotron-h-latent", "qwen35moe"):
            GGUF_CASES[name][1]().save_pretrained(self.folder / f"{name}-hf")
            file = self.folder / f"{name}.gguf"
            write_gguf(self.folder / f"{name}-hf", name, file)
            self.tried(f"gguf {name}", self.same, file, "float32", two)
        quantized.MODELS["llama"]().bfloat16().save_pretrained(self.folder / "bf16")
        path = self.folder / "nvfp4"
        quantized.write(self.folder / "bf16", path, "compressed nvfp4")
        self.tried("nvfp4", self.same, path, None, two)
        mtp.write(self.folder / "mtp")
        self.tried("mtp", self.same, self.folder / "mtp", None, two, mtp=True)
        path = shutil.copytree(self.made("qwen3-next"), self.folder / "qwen-mtp")
        qwen.with_mtp(path, fused=True)
        self.tried("qwen mtp", self.same, path, None, two, mtp=True)

    def dtypes(self):
        wide = self.folder / "wide"
        granite(**WIDE).save_pretrained(wide)
        stree_jax.save(stree_jax.load(wide, "float32"), self.folder / "wide-ours")
        for path in (wide, self.folder / "wide-ours"):
            for dtype in ("bfloat16", "int8"):
                args = path, dtype, mesh_of(model=2)
                self.tried(f"{path.name} {dtype}", self.same, *args)
        both = wide, "int8", mesh_of(data=2, model=2)
        self.tried("rows and parts", self.same, *both)
        every = self.made("mamba2"), "float32", mesh_of(model=8)
        self.tried("whole", self.same, *every, whole=True)
        every = self.ours("mamba2"), "int8", mesh_of(model=8)
        self.tried("whole ours", self.same, *every, whole=True)

    def others(self):
        self.tried("by hand", self.by_hand)
        self.tried("only parts are read", self.only_parts)
        self.tried("refused first", self.refused_first)
        self.tried("odd", self.odd)

    def by_hand(self):
        """Heads and groups by the names of the file, four devices sharing two groups
        and two heads of keys."""
        path = self.made("granite")
        model = stree_jax.load(path, "float32", mesh=mesh_of(model=4))
        file = load_file(path / "model.safetensors")
        w = file["model.layers.0.mamba.in_proj.weight"]
        z, x, B, C, dt = np.split(w, np.cumsum([64, 64, 10, 10]))
        q, k, v = (
            file[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv"
        )
        out = file["model.layers.0.mamba.out_proj.weight"]
        in_proj, out_proj = (
            model.params["layers_0"]["mamba"][name] for name in ("in_proj", "out_proj")
        )
        qkv = model.params["layers_2"]["attention"]["qkv"]
        for i in range(4):
            heads, group = slice(16 * i, 16 * i + 16), i // 2
            one = slice(5 * group, 5 * group + 5)
            parts = z[heads], x[heads], B[one], C[one], dt[2 * i : 2 * i + 2]
            assert bits(shard(in_proj, i)) == bits(np.concatenate(parts))
            assert bits(shard(out_proj, i)) == bits(out[:, heads])
            head, kv = (slice(8 * j, 8 * j + 8) for j in (i, i // 2))
            parts = q[head], k[kv], v[kv]
            assert bits(shard(qkv, i)) == bits(np.concatenate(parts))

    def only_parts(self):
        """Checks that only a device's part of a divided parameter is read."""
        read, real = {}, stored_tensors._read_slices

        def noted(name, info, index):
            array = real(name, info, index)
            read.setdefault(name, []).append(array.size / np.prod(info.shape))
            return array

        stored_tensors._read_slices = noted
        try:
            path = self.made("granite-nope")
            stree_jax.load(path, "float32", mesh=mesh_of(model=4))
        finally:
            stored_tensors._read_slices = real
        prefix = "model.layers.1.self_attn."
        assert read[f"{prefix}q_proj.weight"] == [0.25] * 4
        assert read[f"{prefix}k_proj.weight"] == [0.5] * 4
        assert read[f"{prefix}o_proj.weight"] == [0.25] * 4
        assert max(read["model.layers.0.mamba.in_proj.weight"]) < 0.25
        assert read["model.norm.weight"] == [1.0]

    def refused_first(self):
        """Checks that errors are one line and come before any weight is read."""
        ours = shutil.copytree(self.ours("mamba2"), self.folder / "no-weights")
        for file in (ours / "params").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
        theirs, real = self.made("mamba2"), stored_tensors.Tensors.read
        stored_tensors.Tensors.read = None
        try:
            for path in (ours, theirs):
                for mesh, words in (
                    (mesh_of(model=4), "no layer of this model divides by model=4"),
                    (mesh_of(rows=2), "unknown axis 'rows'"),
                ):
                    refused(words, path, "float32", mesh=mesh)
            refused(
                "48 columns in units of 48 do not",
                theirs,
                "int8",
                mesh=mesh_of(model=3),
            )
            refused("unknown axis", theirs, None, mesh=mesh_of(rows=2), whole=True)
        finally:
            stored_tensors.Tensors.read = real

    def odd(self):
        """Checks that NaN in a part is reported once, with its tensor."""
        name = "model.layers.1.self_attn.k_proj.weight"
        path = shutil.copytree(self.made("granite"), self.folder / "odd")
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors[name][9, 3] = np.nan
        save_file(tensors, file, metadata={"format": "pt"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opened = stree_jax.convert.open_local(CheckpointFiles(path))
            checkpoint = stree_jax.convert.checked(opened, "float32")
            mesh = mesh_of(model=4)
            cut = stree_jax.models.sharding.placement.cut_for(
                checkpoint.config, mesh, checkpoint.weight_format
            )
            told = []
            checkpoint.read(warn=told.append, mesh=mesh, cut=cut)
        assert told == [f"{file}: {name} holds NaN or infinity; kept as it is"], told
        assert not caught, caught


def shard(array, i):
    """Returns part i of an array."""
    return next(s.data for s in array.addressable_shards if s.device.id == i)


def refused(words, *args, **options):
    try:
        stree_jax.load(*args, **options)
    except CheckpointError:
        raise
    except ValueError as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


class pieces_of:
    """Sets how many numbers are read at a time."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.usual, stored_tensors.PIECE = stored_tensors.PIECE, self.count

    def __exit__(self, *error):
        stored_tensors.PIECE = self.usual


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    cases = Cases(Path(sys.argv[1]))
    cases.families()
    cases.formats()
    cases.dtypes()
    cases.others()
    print(json.dumps(cases.said))


if __name__ == "__main__":
    main()
