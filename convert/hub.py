"""Downloads models from the Hugging Face hub, by their name.

A repository often has the same weights several times (safetensors, pickles, ONNX,
several GGUF quantizations), and the state of an optimizer. From the repository's list
of files this module chooses those that `load` opens.
"""

import glob
import json
import math
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.fields import has_drafter_fields
from stree_jax.convert.families import families
from stree_jax.convert.families.configs import detect
from stree_jax.convert.saved.config import PARAMS, SOURCE_CONFIG, is_ours
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.gguf_header import (
    MAX_HEADER,
    SHARD,
    first_shards,
    read_one,
)
from stree_jax.convert.tensors.quantization_config import MODELOPT_FILE, RECIPE_FILES
from stree_jax.convert.tensors.tensor_files import (
    ADAPTER,
    INDEX,
    read_json,
    weights_among,
)
from stree_jax.convert.tensors.torch_files import PICKLED
from stree_jax.convert.tokenizers.tokenizer import tokenizer_files_among

CONFIG_FILES = (
    *("config.json", MODELOPT_FILE, *RECIPE_FILES, SOURCE_CONFIG),
    ADAPTER,  # downloaded so that `load` reports it as an error
)
NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w.-]+)"
    r"(?:/(?P<file>[^:@]+\.(?:gguf|safetensors)))?"
    r"(?::(?P<quant>[\w.-]+))?"
    r"(?:@(?P<revision>[^\s:]+))?",
    re.ASCII,
)
WEIGHTS = (".safetensors", ".gguf", *PICKLED)
MAX_LISTED = 24  # files listed in a message
HEADER_PIECES = (2**20, 2**23, MAX_HEADER)  # bytes of a GGUF file to fetch, in turn
FIRST_PIECE = 2**17  # bytes of a safetensors file that usually include its whole header
CONNECTIONS = 8
LAST_PIECE = 2**18  # bytes at the end of a torch file, usually its list of records
RECORD = 2**10  # most bytes before a record's content, including its name
NUMBERS = re.compile(r"[^/]*/data/\d+")  # records of a torch file that are not fetched
SAMPLED = re.compile(r"(?:.*\.)?(?:lm_head|embed_tokens|embeddings?)\.weight")
SAMPLE = 2**13  # numbers of a tensor that are fetched at each of two places

Wanted = Sequence[Sequence[str]]  # groups of names; of each, the first file is fetched


@dataclass(frozen=True)
class HubName:
    """A model on the hub.

    Attributes:
      repo: OWNER/NAME of the repository.
      file: path of a file in the repository, or None.
      quant: quantization in a GGUF file's name, such as Q4_K_M, or None.
      revision: branch, tag or commit. If None, the main branch.
    """

    repo: str
    file: str | None = None
    quant: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        file = "" if self.file is None else f"/{self.file}"
        quant = "" if self.quant is None else f":{self.quant}"
        return f"{self.repo}{file}{quant}" + (
            "" if self.revision is None else f"@{self.revision}"
        )


def hub_name(name: str) -> HubName | None:
    """Parses OWNER/NAME, OWNER/NAME/FILE.gguf or OWNER/NAME:Q4_K_M, each optionally
    with @REVISION. Returns None for anything else, such as a path."""
    found = NAME.fullmatch(name)
    if found is None or found["repo"].endswith(WEIGHTS):  # the path of a missing file
        return None
    return HubName(**found.groupdict())


@dataclass(frozen=True)
class Repository:
    """The files of a repository, on the hub or, if the hub cannot be reached, in the
    local cache.

    Attributes:
      name: the model's name on the hub.
      sizes: size of each file in bytes, by name. None if it is unknown.
      cached: the snapshot in the cache, if the hub cannot be reached.
      problem: why the hub cannot be reached.
    """

    name: HubName
    sizes: dict[str, int | None]
    cached: Path | None = None
    problem: str = ""

    def get(self, files: Collection[str]) -> Path:
        """Downloads files of the repository and returns their folder."""
        if self.cached is not None:
            return self.cached
        from huggingface_hub import snapshot_download

        with one_line(self.name):
            found = snapshot_download(
                self.name.repo,
                revision=self.name.revision,
                allow_patterns=[glob.escape(file) for file in sorted(files)],
            )
        return Path(found)


def repository(name: HubName) -> Repository:
    """Lists a repository's files.

    Raises:
      CheckpointError: the hub has no such repository or revision, or the hub cannot be
        reached and the cache does not have it.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        model = HfApi().model_info(
            name.repo, revision=name.revision, files_metadata=True
        )
        return Repository(name, {s.rfilename: s.size for s in model.siblings or ()})
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise refusal(name, error) from error
    except Exception as error:  # any error of the HTTP libraries of huggingface_hub
        unreachable = error
    try:
        found = snapshot_download(
            name.repo, revision=name.revision, allow_patterns=[], local_files_only=True
        )
    except Exception as error:
        raise refusal(name, unreachable) from error
    folder = Path(found)
    files = [file for file in folder.rglob("*") if file.is_file()]
    sizes = {f.relative_to(folder).as_posix(): f.stat().st_size for f in files}
    return Repository(name, dict(sizes), folder, reason(unreachable))


@contextmanager
def one_line(name: HubName) -> Iterator[None]:
    """Converts any error of a download to a CheckpointError with a message of one
    line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # any error of the HTTP libraries of huggingface_hub
        raise refusal(name, error) from error


def refusal(name: HubName, error: Exception) -> CheckpointError:
    what = "directory" if name.file is None else "file"
    return CheckpointError(
        f"{name}: no such {what}, and not available from the hub ({reason(error)})"
    )


def reason(error: Exception) -> str:
    """Returns what failed, and what to do if that is known, in one line."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return (
                "access is restricted: accept the terms on the model's page, then run "
                "hf auth login or set HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            return "no such repository; a private one needs hf auth login or HF_TOKEN"
        case errors.RevisionNotFoundError():
            return "the repository has no such revision"
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, and the cache does not have it"
    return (str(error) or type(error).__name__).splitlines()[0]


def fetch(name: HubName, wanted: Wanted = ()) -> Path:
    """Downloads from a repository the files that `load` opens.

    Args:
      name: the model's name on the hub.
      wanted: groups of alternative files to download instead of a model. The first
        file of each group that exists is downloaded.

    Returns:
      A directory, or a GGUF file.

    Raises:
      CheckpointError: the files cannot be downloaded. The message is one line.
    """
    found = repository(name)
    if wanted:
        firsts = [next((f for f in group if f in found.sizes), "") for group in wanted]
        if not any(firsts):
            names = ", ".join(sum(map(list, wanted), []))
            raise CheckpointError(f"{name}: the repository has none of {names}")
        return found.get([file for file in firsts if file])
    if name.file is not None:
        return found.get(shards_of(found, name.file)) / name.file
    return chosen(found, found.get)


def fetch_headers(name: HubName, folder: Path) -> Path:
    """Downloads a repository's config, tokenizer and the headers of its weights.

    Weights that are all in the cache already are used directly. A torch file that is
    not a ZIP archive (written by torch before 1.6) is downloaded whole, because its
    list of tensors is mixed with their numbers.

    Args:
      name: the model's name on the hub.
      folder: an empty folder. Files of weights are written to it with their header and
        size, and zeros instead of numbers, which need no space on the disk. Of the
        embedding and the head a few numbers are included, which show whether the two
        are equal.

    Returns:
      A directory or GGUF file that can be described, but not loaded.
    """
    found = repository(name)
    if found.cached is not None:
        return fetch(name)

    def get(files: Collection[str]) -> Path:
        if any(file.startswith(f"{PARAMS}/") for file in files):
            return folder  # for our own format the config is enough
        weights = [file for file in files if file.endswith(WEIGHTS)]
        small = [file for file in files if file not in weights]
        kept = {file: _cached(name, file) for file in weights}
        if None in kept.values():  # do not mix files of zeros with complete ones
            kept = dict.fromkeys(weights)
        if small:
            snapshot = found.get(small)
            kept |= {file: snapshot / file for file in small}
        for file, path in kept.items():
            if path is not None:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).symlink_to(path.absolute())
        missing = [file for file, path in kept.items() if path is None]
        with ThreadPoolExecutor(CONNECTIONS) as pool, one_line(name):
            list(pool.map(lambda file: _write_header(found, file, folder), missing))
        return folder

    if name.file is not None:
        return get(shards_of(found, name.file)) / name.file
    return chosen(found, get)


def chosen(found: Repository, get: Callable[[Collection[str]], Path]) -> Path:
    """Chooses the files of a model and downloads them with `get`.

    Downloads the config and the tokenizer first, and the weights only if the
    architecture is supported.
    """
    names, name = found.sizes.keys(), found.name
    marks = (family.file for family in families().values())
    small = [file for file in (*CONFIG_FILES, *marks) if file in names]
    small += tokenizer_files_among(names)
    ours = [file for file in names if file.startswith(f"{PARAMS}/")]
    weights = weights_among(names) if name.quant is None else None
    if weights is None and (not ours or name.quant is not None):
        file = the_gguf(found)
        return get(shards_of(found, file)) / file
    if "config.json" not in names:
        raise CheckpointError(f"{name}: the repository has no config.json")
    directory = get(small)
    files = CheckpointFiles(directory)
    if is_ours(files):
        return get(ours)
    if not has_drafter_fields(files.json()):
        detect(files.fields())
    if weights is None:
        raise CheckpointError(f"{name}: no weights; params/ is in another format")
    if not weights.endswith(INDEX):
        return get([weights])
    index = read_json(get([weights]) / weights).get("weight_map")
    listed = index.values() if isinstance(index, dict) else ()
    shards = {str(file) for file in listed}
    if found.cached is not None and (missing := sorted(shards - names)):
        raise CheckpointError(
            f"{name}: {missing[0]} is not in the cache, and the hub cannot be reached "
            f"({found.problem})"
        )
    return get(shards & names) if shards & names else directory


def the_gguf(found: Repository) -> str:
    """Returns the GGUF file, or its first shard, that the name refers to."""
    name = found.name
    models = first_shards(
        file
        for file in found.sizes
        if file.endswith(".gguf") and not re.search("mmproj|imatrix", file)
    )
    if not models:
        where = "" if found.cached is None else f" in the cache ({found.problem})"
        raise CheckpointError(
            f"{name}: no weights{where}; want model.safetensors, pytorch_model.bin, "
            "their index, or GGUF files"
        )
    if name.quant is None:
        fitting = models
    else:
        end = re.compile(
            rf"(?:.*[-./])?{re.escape(name.quant)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.I
        )
        fitting = [file for file in models if end.fullmatch(file)]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join((fitting or models)[:MAX_LISTED])
    example = (fitting or models)[0]
    what = (
        "several GGUF files"
        if name.quant is None
        else f"{len(fitting) or 'no'} GGUF files of {name.quant}"
    )
    raise CheckpointError(
        f"{name}: {what}; name one, such as {name.repo}/{example}: {listed}"
    )


def shards_of(found: Repository, file: str) -> list[str]:
    """Returns the names of all shards of a GGUF file; for other files, their own
    name."""
    if file not in found.sizes:
        where = "" if found.cached is None else f" in the cache ({found.problem})"
        there = first_shards(f for f in found.sizes if f.endswith(Path(file).suffix))
        also = f"; it has {', '.join(there[:MAX_LISTED])}" if there else ""
        raise CheckpointError(f"{found.name.repo}: no file {file}{where}{also}")
    shard = SHARD.fullmatch(file)
    if shard is None:
        return [file]
    head, _, count = shard.groups()
    names = [f"{head}-{i:05}-of-{count}.gguf" for i in range(1, int(count) + 1)]
    return [name for name in names if name in found.sizes]


def _cached(name: HubName, file: str) -> Path | None:
    """Returns a file in the local cache, or None. Downloads nothing."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name.repo, file, revision=name.revision)
    return Path(path) if isinstance(path, str) else None


def _write_header(found: Repository, file: str, folder: Path) -> None:
    """Writes a file of weights with its header and size, but without numbers."""
    target, size = folder / file, found.sizes[file] or 0
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.endswith(PICKLED):
        _write_records(found, file, target)
        return
    if not file.endswith(".gguf"):
        piece = _range(found.name, file, 0, FIRST_PIECE)
        length = 8 + int.from_bytes(piece[:8], "little")
        if len(piece) < length <= MAX_HEADER:
            piece += _range(found.name, file, len(piece), length)
        _write_sparse(target, piece[:length], size)
        _write_samples(found, file, target, piece[:length])
        return
    for end in HEADER_PIECES:
        _write_sparse(target, _range(found.name, file, 0, min(end, size)), size)
        if end >= size:
            return
        try:
            # If the header is incomplete, zeros follow, and parsing them raises an
            # error.
            read_one(target)
            return
        except CheckpointError:
            continue  # describing the file reports the last error


def _write_sparse(target: Path, begin: bytes, size: int) -> None:
    with target.open("wb") as opened:
        opened.write(begin)
        opened.truncate(max(size, len(begin)))


def _write_samples(found: Repository, file: str, target: Path, header: bytes) -> None:
    """Writes some numbers of the embedding and the head to a file with a header.

    They are from the same two places of both tensors: the beginning and the middle.
    """
    try:
        tensors = json.loads(header[8:])
        samples = [
            (len(header) + begin, end - begin, math.prod(tensors[name]["shape"]))
            for name in tensors
            if SAMPLED.fullmatch(name)
            for begin, end in [tensors[name]["data_offsets"]]
        ]
    except (ValueError, TypeError, LookupError, RecursionError):
        return  # describing the file reports the error
    with target.open("r+b") as opened:
        for start, size, count in samples:
            width = size // max(count, 1)  # bytes per number
            for first in (0, count // 2):
                begin = start + first * width
                end = begin + min(SAMPLE, count - first) * width
                if 0 <= begin < end:
                    opened.seek(begin)
                    opened.write(_range(found.name, file, begin, end))


def _write_records(found: Repository, file: str, target: Path) -> None:
    """Writes a torch file, which is a ZIP archive, without the numbers of its
    tensors."""
    size = found.sizes[file] or 0

    def write(begin: int, end: int) -> None:
        begin, end = max(begin, 0), min(end, size)
        if begin >= end:
            return
        with target.open("r+b") as opened:
            opened.seek(begin)
            opened.write(_range(found.name, file, begin, end))

    _write_sparse(target, b"", size)
    write(size - LAST_PIECE, size)
    try:
        with zipfile.ZipFile(target) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError):
        records = []
    if not records:  # not an archive, or its list is longer than `LAST_PIECE`
        target.unlink()
        target.symlink_to((found.get([file]) / file).absolute())
        return
    for record in records:
        if not NUMBERS.fullmatch(record.filename):
            begin = record.header_offset
            write(begin, begin + RECORD + record.compress_size)


def _range(name: HubName, file: str, start: int, end: int) -> bytes:
    """Downloads bytes start:end of a file on the hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    url = hf_hub_url(name.repo, file, revision=name.revision)
    session: Any = get_session()
    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}"}
    headers["Accept-Encoding"] = "identity"
    response = session.get(url, headers=headers)
    response.raise_for_status()
    return response.content[: end - start]
