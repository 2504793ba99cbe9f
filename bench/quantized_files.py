"""Writes GGUF files with random weights in llama.cpp's quantized types.

    python -m bench.quantized_files --llama-python /path/to/python \\
        --shape hybrid-1.2b --types Q4_K_M Q4_0 --out FOLDER

Our writer makes a bfloat16 file of the shape, from which llama.cpp's own quantizer
makes FOLDER/SHAPE-TYPE.gguf. So tensors have the types that they have in published
files. The files have no tokenizer.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.llama_process import llama_process
from bench.shapes import config_of, random_model
from stree_jax.convert.export_gguf import write_gguf

TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M"),
    *("Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
)


def write_types(
    shape: str, types: Sequence[str], python: Path, folder: Path
) -> list[Path]:
    """Writes a file of each type and returns their paths.

    Args:
      shape: a name of `shapes.NAMES`.
      types: names of llama.cpp's types of files, such as those of `TYPES`.
      python: a Python whose environment has llama-cpp-python.
      folder: where the files are written.

    Raises:
      ValueError: an unknown shape, or one that llama.cpp does not support.
      RuntimeError: llama.cpp fails, for example because it does not have a type.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch) / "source.gguf"
        model = random_model(config_of(shape), "bfloat16")
        write_gguf(model.config, model.params, "bf16", source)
        del model
        for kind in types:
            target = folder / f"{shape}-{kind}.gguf"
            with llama_process(python) as ask:  # each type in a process that may fail
                ask("quantize", source=str(source), target=str(target), kind=kind)
            written.append(target)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("--shape", default="hybrid-2m")
    parser.add_argument("--types", nargs="+", default=TYPES, metavar="TYPE")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    for path in write_types(args.shape, args.types, args.llama_python, args.out):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
