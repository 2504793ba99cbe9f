"""The formats that can be read, for messages and for the README."""

from stree_jax.convert.families import FAMILIES


def names() -> str:
    return ", ".join(family.name for family in FAMILIES)


def table() -> str:
    """The table of the README."""
    lines = [
        "| format | models | logits tested against | export |",
        "| --- | --- | --- | --- |",
    ]
    for f in FAMILIES:
        written = "no" if f.export is None else "yes"
        if f.format == "native":
            written = "as mamba2, if it can be"
        lines.append(f"| `{f.name}` | {f.models} | {f.compared} | {written} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
