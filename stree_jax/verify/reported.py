"""Lists the acceptance lengths that makers and users report for published drafters.

`check-drafter` prints them after its own figures. An acceptance length is the mean
number of tokens per target pass, the target's own token included. The figures were
collected in November 2026 from model cards, papers and issue threads; they depend on
the text, so only large differences mean something.
"""

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

Range = tuple[float, float]


class Usual(NamedTuple):
    """Usual acceptance of drafters of one kind on code and grade-school math, in the
    target's chat template, greedy. Estimated from the rows of `REPORTED`.

    Attributes:
      first, fourth: share of first and fourth drafts that are accepted, where those
        before them are.
      chain: acceptance length of chains of 7.
    """

    first: Range
    fourth: Range
    chain: Range


USUAL = {
    "EAGLE-3": Usual((0.75, 0.85), (0.40, 0.55), (3.5, 5.5)),
    "DFlash": Usual((0.80, 0.88), (0.45, 0.55), (3.8, 5.5)),
    "DSpark": Usual((0.85, 0.90), (0.60, 0.70), (4.5, 6.2)),
    "DFlash2": Usual((0.85, 0.90), (0.55, 0.65), (5.0, 5.5)),
    "MTP": Usual((0.85, 0.93), (0.45, 0.55), (3.5, 4.8)),
}


@dataclass(frozen=True)
class Reported:
    """Acceptance lengths of one drafter.

    Attributes:
      drafter: pattern of its name without the owner, in lower case; "mtp" for the
        target's MTP layers.
      drafts: length of the chains.
      by: who reports them: its makers, or the program that ran it.
      lengths: acceptance length by kind of text.
      setting: temperature, and the target's weights if they are quantized.
      target: pattern of the target's name without the owner, in lower case.
    """

    drafter: str
    drafts: int
    by: str
    lengths: dict[str, float]
    setting: str = "greedy"
    target: str = "*"

    def __str__(self) -> str:
        lengths = ", ".join(f"{text} {n:.2f}" for text, n in self.lengths.items())
        where = f"chains of {self.drafts}, {self.setting}"
        return f"{self.by} ({where}): tokens per pass {lengths}"


def _deepspec(kind: str, size: str, gsm8k: float, code: float, chat: float) -> Reported:
    """Returns a row of DeepSpec's paper."""
    name = f"{kind}_qwen3_{size}_{'ttt7' if kind == 'eagle3' else 'block7'}"
    lengths = {"GSM8K": gsm8k, "HumanEval": code, "MT-Bench": chat}
    return Reported(name, 7, "its makers", lengths, "T = 1")


def _bundle(drafter: str, gsm8k: float, code: float, chat: float) -> Reported:
    """Returns a row of SGLang's SpecBundle."""
    lengths = {"GSM8K": gsm8k, "HumanEval": code, "MT-Bench": chat}
    return Reported(drafter, 7, "SGLang", lengths)


REPORTED = (
    Reported(
        "lfm2.5-1.2b-instruct-dspark",
        7,
        "mlx-dspark",
        {"all": 5.28, "code": 6.70, "math": 4.76, "chat": 3.11},
    ),
    Reported(
        "lfm2.5-2.6b-dspark",
        6,
        "mlx-dspark",
        {"all": 4.00, "code": 3.75, "math": 4.55, "chat": 3.03},
    ),
    Reported(
        "*nemotron-3.5-lightning*-dspark*",
        4,
        "mlx-dspark",
        {"code": 4.55, "math": 4.41, "chat": 3.74},
        "greedy, target in 4 bits",
    ),
    Reported(
        "qwen3.8-27b-dflash2",
        7,
        "its makers",
        {"GSM8K": 5.46},
        "T = 1, top-p 0.95, top-k 20",
    ),
    Reported(
        "qwen3.8-27b-dflash2",
        7,
        "llama.cpp",
        {"all": 3.58, "code": 3.82, "math": 3.64, "writing": 3.26},
        "T = 1",
    ),
    Reported(
        "mtp",
        7,
        "llama.cpp",
        {"all": 2.81, "code": 2.86, "math": 2.71, "writing": 2.73},
        "T = 1",
        target="qwen3.8-27b*",
    ),
    Reported("mtp", 6, "users", {"code": 4.74}, target="qwen3.6-27b*"),
    Reported("mtp", 3, "users", {"general": 2.67}, target="qwen3.6-27b*"),
    Reported("mtp", 3, "LightLLM", {"all": 2.74}, target="qwen3.5-0.8b*"),
    Reported("qwen3-8b-dflash-b16", 15, "its makers", {"GSM8K": 6.36, "MATH": 8.05}),
    Reported("gpt-oss-120b-eagle3-v3", 3, "SGLang", {"MT-Bench": 2.68}),
    Reported("gpt-oss-120b-eagle3-long-context", 3, "SGLang", {"MT-Bench": 2.22}),
    Reported("gpt-oss-120b-eagle3-short-context", 3, "SGLang", {"MT-Bench": 1.92}),
    _deepspec("eagle3", "4b", 5.14, 4.16, 2.39),
    _deepspec("dflash", "4b", 5.40, 4.74, 3.07),
    _deepspec("dspark", "4b", 6.11, 5.38, 3.64),
    _deepspec("eagle3", "8b", 5.30, 4.33, 2.66),
    _deepspec("dflash", "8b", 5.33, 4.64, 3.11),
    _deepspec("dspark", "8b", 6.17, 5.52, 3.72),
    _deepspec("dspark", "14b", 6.21, 5.43, 3.70),
    _bundle("sglang-eagle3-qwen3-next-80b*", 4.35, 5.46, 3.05),
    _bundle("sglang-eagle3-llama-3.1-8b*", 2.97, 4.91, 3.86),
    _bundle("eagle3-llama3.1-instruct-8b", 1.77, 4.10, 3.91),
)


def reported(drafter: str, target: str) -> list[Reported]:
    """Returns the rows of a drafter.

    Args:
      drafter: its directory or hub id, or "mtp".
      target: directory or hub id of the target.
    """
    names = _plain(drafter), _plain(target)
    return [
        row
        for row in REPORTED
        if fnmatchcase(names[0], row.drafter) and fnmatchcase(names[1], row.target)
    ]


def _plain(name: str) -> str:
    """Returns a model's name without owner, folder and revision, in lower case."""
    return Path(name).name.partition("@")[0].lower()


def as_json(kind: str, drafter: str, target: str) -> dict[str, Any]:
    """Returns the reported rows and the usual figures as JSON values.

    Args:
      kind: as `Source.kind`.
      drafter, target: as in `reported`.
    """
    usual = USUAL.get(kind)
    return {
        "reported": [asdict(row) for row in reported(drafter, target)],
        "usual": None if usual is None else usual._asdict(),
    }


def as_lines(kind: str, drafter: str, target: str) -> list[str]:
    """Returns the result of `as_json` as lines of text."""
    found = [f"reported by {row}" for row in reported(drafter, target)]
    if kind in USUAL:
        first, fourth = (_percent(share) for share in USUAL[kind][:2])
        low, high = USUAL[kind].chain
        found.append(
            f"usual for {kind} on code and math in the chat template, greedy: first "
            f"draft {first}, fourth {fourth}, chains of 7 {low} to {high} tokens per "
            "pass"
        )
    return found


def _percent(share: Range) -> str:
    return f"{100 * share[0]:.0f} to {100 * share[1]:.0f} %"
