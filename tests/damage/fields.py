"""Damage to JSON files: fields with other names, types and sizes, and broken syntax."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.damage.files import files_of
from tests.damage.sources import Rng, Useless

LONG = 300_000  # items of a list, layers of a pattern
MOST_PLACES = 10_000  # in a JSON file


def json_files(directory: Path) -> list[Path]:
    def is_object(file: Path) -> bool:
        try:
            return isinstance(json.loads(file.read_text()), dict)
        except (ValueError, RecursionError):
            return False

    return [file for file in files_of(directory) if is_object(file)]


def some_json(directory: Path, rng: Rng) -> Path:
    """Chooses a config file with probability one half, otherwise any JSON file."""
    files = json_files(directory)
    if not files:
        raise Useless
    configs = [file for file in files if file.name.endswith("config.json")]
    return rng.choice(configs if configs and rng.random() < 0.5 else files)


def places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every (container, key) of a JSON value."""
    if isinstance(values, dict | list):
        keys = list(values) if isinstance(values, dict) else range(len(values))
        for key in keys:
            yield values, key
            yield from places(values[key])


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def plain_odds() -> list[Any]:
    retyped: list[Any] = [
        "",
        "x",
        "7",
        "a\nb",
        "\ud800",
        "é" * 5000,
        None,
        True,
        False,
        [],
        {},
    ]
    retyped += [[1, 2], ["mamba"], [None], {"a": {"b": 1}}, nested(200), nested(900)]
    huge = [10**9, 2**24, 2**24 + 1, 2**31, 2**63, 2**64, 10**400, 1e308, 1e30]
    floats = [float("nan"), float("inf"), float("-inf"), 0.5, 1e-308, -0.0, 1e-45]
    return [*retyped, *huge, *floats, 0, 1, 2, 3, 7, 64, 1024, -1, -(2**63), -1e9]


ODDS = plain_odds()


def odd_value(value: Any, rng: Rng) -> Any:
    near: list[Any] = []
    if isinstance(value, int | float) and not isinstance(value, bool):
        near = [value + 1, value - 1, -value, 2 * value, float(value), str(value)]
    elif isinstance(value, list | str) and value:
        flat = not any(isinstance(item, dict | list) for item in value)
        times = max(1, LONG // len(value)) if flat else 1
        near = [value[1:], value[::-1], value + value, value * times]
    elif isinstance(value, dict) and value:
        near = [{}, list(value), {**value, "extra": 1}, {"a": value}]
    return rng.choice(near if near and rng.random() < 0.4 else ODDS)


def fields(directory: Path, rng: Rng) -> str:
    """Removes one to four fields of a JSON file, or changes their type or size."""
    file = some_json(directory, rng)
    values = json.loads(file.read_text())
    changed = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if not (found := list(itertools.islice(places(values), MOST_PLACES))):
            break
        holder, key = rng.choice(found)
        if rng.random() < 0.2:
            del holder[key]
            changed.append(f"{key} gone")
            continue
        holder[key] = odd_value(holder[key], rng)
        changed.append(f"{key}={str(holder[key])[:30]!r}")
    write_json(file, values)
    return f"{file.name}: {', '.join(changed)}"


def write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values), encoding="utf-8", errors="surrogatepass")


FOREIGN = (
    "quantization_config rope_scaling rope_parameters model_type ssm_cfg format "
    "attn_layer_idx d_intermediate mamba_d_head mamba_d_ssm mamba_expand expand "
    "num_local_experts layer_types layers_block_type hybrid_override_pattern head_dim "
    "partial_rotary_factor rope_theta eos_token_id tie_word_embeddings vocab_size "
    "time_step_limit time_step_min moe_latent_size n_group topk_group stop_tokens "
    "attn_layer_indices"
)
NAMED = ["llama", "mamba2", "mamba", "stree-jax", "nemotron_h", "llama3", "M*E-" * 9]


def foreign(directory: Path, rng: Rng) -> str:
    """Adds a field that this format calls otherwise, or does not expect."""
    files = [file for file in json_files(directory) if "config" in file.name]
    if not files:
        raise Useless
    file, name = rng.choice(files), rng.choice(FOREIGN.split())
    values = json.loads(file.read_text())
    objects = [v for v in values.values() if isinstance(v, dict)]
    values_of = rng.choice([values, values, *objects])
    values_of[name] = rng.choice(["M" * LONG, ["mamba"] * LONG, *NAMED, *ODDS])
    write_json(file, values)
    return f"{file.name}: {name}={str(values_of[name])[:30]!r} added"


def nonsense(directory: Path, rng: Rng) -> str:
    file = some_json(directory, rng)
    text = file.read_bytes()
    depth = rng.choice([100, 900, 3000, 200_000])
    changed = {
        "nested lists": b'{"a": ' + b"[" * depth + b"]" * depth + b"}",
        "nested objects": b'{"a":' * depth + b"1" + b"}" * depth,
        "open": b"[" * depth,
        "duplicate": text.rstrip()[:-1] + b', "model_type": "x", "format": "x"}',
        "duplicate before": b'{"model_type": "x", "format": 3,' + text.lstrip()[1:],
        "no object": rng.choice([b"[]", b"3", b'"x"', b"null", b"true", b"{}", b" "]),
        "invalid UTF-8": text.replace(b'"', b'"\xff\xfe', 1),
        "UTF-16": text.decode("utf-8", "replace").encode("utf-16"),
        "BOM": b"\xef\xbb\xbf" + text,
        "long number": text.rstrip()[:-1] + b', "a": ' + b"1" * 9999 + b"}",
        "comments": b"// config\n" + text,
        "trailing": text + b"{}",
        "single quotes": text.replace(b'"', b"'"),
        "null bytes": text.replace(b" ", b"\0"),
        "long": b" " * 3_000_000 + text,
    }
    what = rng.choice(list(changed))
    file.write_bytes(changed[what])
    return f"{file.name}: {what}"
