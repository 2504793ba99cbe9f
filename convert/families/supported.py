"""The table of supported checkpoint formats in docs/reference/supported-models.md."""

from stree_jax.convert.families import families


def table() -> str:
    """Returns the table of docs/reference/supported-models.md."""
    lines = [
        "| format | models | logits tested against | export |",
        "| --- | --- | --- | --- |",
    ]
    for f in families().values():
        lines.append(f"| `{f.mark}` | {f.models} | {f.compared} | {f.exported} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
