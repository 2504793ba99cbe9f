"""Builds the edit prompts, which ask for a copy of a text, some with a small change.

    python -m tools.build_edits --corpus DIR --out edits.jsonl.gz

`--corpus` holds mbpp/mbpp.jsonl and standard-ebooks/NAME.txt.gz. The same corpus gives
the same prompts in every version of Python, because hashes of the texts select them.
"""

import argparse
import ast
import gzip
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path

SEED = "edits 1"
PER_KIND = 30
# Characters to copy: 100 to 300 tokens of the bundled pair's small vocabulary.
CODE_LENGTH = range(300, 900)
QUOTE_LENGTH = range(350, 900)

# The bundled pair was not trained on these tasks and books, so it cannot recall them.
TASKS = range(11, 511)
BOOKS = {
    "bram-stoker_dracula": "Bram Stoker, Dracula",
    "charles-dickens_great-expectations": "Charles Dickens, Great Expectations",
    "charlotte-bronte_jane-eyre": "Charlotte Brontë, Jane Eyre",
    "george-eliot_middlemarch": "George Eliot, Middlemarch",
    "herman-melville_moby-dick": "Herman Melville, Moby-Dick",
    "jane-austen_emma": "Jane Austen, Emma",
}

# Where a sentence begins, and a name inside one.
SENTENCE = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.) (?=[A-Z])")
NAME = re.compile(r"(?<=[a-z,;] )(?:(?:Mr\.|Mrs\.|Dr\.|Miss|Lady|Sir) )?[A-Z][a-z]{2,}")

Record = dict[str, str]
Edit = tuple[str, str]  # the instruction, and the beginning of the edited code


def shuffled(texts: Iterable[str]) -> list[str]:
    """Orders texts by a hash of the text and the seed."""
    return sorted(
        texts, key=lambda text: hashlib.sha256((SEED + text).encode()).digest()
    )


def head_of(code: str, change: Callable[[str], str] = str) -> str:
    """Returns the code up to its first `def` line, that line changed."""
    before, line = re.findall(r"\A((?:.*\n)*?)(def .*\n)", code)[0]
    return before + change(line)


def renamed(old: str, new: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"\b{old}\b", new, text)


def new_name(code: str, names: Iterable[str]) -> str:
    return next(n for n in names if not re.search(rf"\b{n}\b", code))


def most_used(function: ast.FunctionDef, names: Iterable[str]) -> str | None:
    """Returns the name that the function uses most, if it is used three times."""
    uses = Counter(n.id for n in ast.walk(function) if isinstance(n, ast.Name))
    best = max(sorted(names), key=lambda name: uses[name], default="")
    return best if uses[best] >= 3 else None


def rename_function(code: str, function: ast.FunctionDef, task: str) -> Edit:
    new = new_name(code, ("solve", "compute", "run"))
    head = head_of(code, renamed(function.name, new))
    return f"Rename the function {function.name} to {new}.", head


def rename_parameter(code: str, function: ast.FunctionDef, task: str) -> Edit | None:
    old = most_used(function, [a.arg for a in function.args.args])
    if old is None:
        return None
    new = new_name(code, ("value", "given", "data"))
    head = head_of(code, renamed(old, new))
    return f"Rename the parameter {old} of {function.name} to {new}.", head


def rename_variable(code: str, function: ast.FunctionDef, task: str) -> Edit | None:
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    old = most_used(function, stored - {a.arg for a in function.args.args})
    if old is None:
        return None
    new = new_name(code, ("current", "found", "state"))
    return f"Rename the variable {old} in {function.name} to {new}.", head_of(code)


def add_docstring(code: str, function: ast.FunctionDef, task: str) -> Edit | None:
    does = re.fullmatch(r"Write a (?:python )?function to (.*\.)", task)
    if does is None or len(re.findall(r"^def ", code, re.M)) > 1:
        return None  # the task may be about another function
    text = does[1][0].upper() + does[1][1:]
    return f"Add this docstring to {function.name}: {text}", head_of(code)


def add_hints(code: str, function: ast.FunctionDef, task: str) -> Edit | None:
    if not function.args.args:
        return None
    head = head_of(code, lambda line: line[: line.index("(") + 1])
    return f"Add type hints to {function.name}.", head


def print_result(code: str, function: ast.FunctionDef, task: str) -> Edit:
    return f"Print what {function.name} returns before it returns it.", head_of(code)


EDITS = (
    *(rename_function, rename_parameter, rename_variable),
    *(add_docstring, add_hints, print_result),
)


def plain_code(code: str) -> str:
    """Returns the code with Unix line ends and without tabs and trailing spaces."""
    lines = code.expandtabs(4).splitlines()
    return "".join(line.rstrip() + "\n" for line in lines if line.strip())


def first_function(code: str) -> ast.FunctionDef | None:
    """Returns the first function of the code, if its `def` is a single line."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions or functions[0].body[0].lineno == functions[0].lineno:
        return None
    return functions[0] if re.search(r"^def .*:$", head_of(code), re.M) else None


def code_edits(corpus: Path) -> list[Record]:
    """Makes prompts of functions with an instruction each, the kinds in turn."""
    lines = (corpus / "mbpp/mbpp.jsonl").read_text(encoding="utf-8").strip().split("\n")
    records, kinds = [], cycle(EDITS)
    edit = next(kinds)
    for line in shuffled(lines):
        task = json.loads(line)
        code = plain_code(task["code"])
        function = first_function(code)
        if task["task_id"] not in TASKS or len(code) not in CODE_LENGTH:
            continue
        if function is None or (made := edit(code, function, task["text"])) is None:
            continue
        edit = next(kinds)
        prompt = (
            f"Instruction: {made[0]} Leave the rest as it is.\n\n"
            f"Code:\n{code}\nEdited code:\n{made[1]}"
        )
        source = f"MBPP, task {task['task_id']}"
        records.append(record(prompt, source, "CC-BY-4.0", "code edit"))
    return records[:PER_KIND]


def quotation(passage: str) -> Edit | None:
    """Returns a question about a passage, and the first words of the answer in it."""
    found = NAME.search(passage)
    if found is None or "“" in passage:  # the only quotation marks are the answer's
        return None
    ends = [m.end() for m in SENTENCE.finditer(passage) if m.end() <= found.start()]
    answer = passage[max(ends, default=0) :]
    if len(answer) not in QUOTE_LENGTH:
        return None
    words = " ".join(answer.split(" ")[:4])
    return f"What does the passage say about {found[0]}?", words


def passages(corpus: Path) -> list[Record]:
    """Makes prompts of paragraphs with a question each, as many of every book."""
    records = []
    for book, source in BOOKS.items():
        packed = (corpus / f"standard-ebooks/{book}.txt.gz").read_bytes()
        text = gzip.decompress(packed).decode()
        found = []
        for passage in shuffled(re.split(r"\n\n+", text)):
            if (asked := quotation(passage)) is None:
                continue
            prompt = (
                f"Passage: {passage}\n\nQuestion: {asked[0]} Quote it to the end.\n\n"
                f"Answer: The passage says: “{asked[1]}"
            )
            found.append(record(prompt, source, "CC0-1.0", "passage"))
        records.append(found[: PER_KIND // len(BOOKS)])
    return [row for rows in zip(*records, strict=False) for row in rows]


def record(prompt: str, source: str, licence: str, kind: str) -> Record:
    return {"prompt": prompt, "source": source, "licence": licence, "kind": kind}


def build(corpus: Path) -> bytes:
    """Returns the prompts as lines of JSON, the two kinds in turn.

    Raises:
      ValueError: a folder or file that is not there.
    """
    needed = ["mbpp/mbpp.jsonl", *(f"standard-ebooks/{b}.txt.gz" for b in BOOKS)]
    for path in (corpus, *(corpus / name for name in needed)):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    pairs = zip(code_edits(corpus), passages(corpus), strict=False)
    rows = [json.dumps(row, ensure_ascii=False) for pair in pairs for row in pair]
    return "".join(row + "\n" for row in rows).encode()


def main() -> int:
    """Writes the prompts, gzipped if the name ends in .gz."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        data = build(args.corpus)
        packed = gzip.compress(data, 9, mtime=0) if args.out.suffix == ".gz" else data
        args.out.write_bytes(packed)
    except (OSError, ValueError) as error:
        print(f"build_edits: {error}", file=sys.stderr)
        return 2
    print(len(data.splitlines()), "prompts,", args.out.stat().st_size, "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
