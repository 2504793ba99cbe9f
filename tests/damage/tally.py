"""Counts of a run."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of a run.

    Attributes:
      refused: cases refused by `load`, by kind of damage.
      accepted: cases accepted by `load`, by kind of damage.
      exported: models that were accepted and exported.
      commands: commands run in separate processes.
      command_refusals: those of them with exit code 2.
      kills: killed processes.
      interrupted: those of them killed during a conversion.
      whole: complete directories left by killed processes.
      slowest: seconds of the slowest call, and its name.
      longest: characters of the longest message, and its call.
      memory: growth of the peak memory since the start, in bytes.
    """

    cases: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    exported: int = 0
    commands: int = 0
    command_refusals: int = 0
    kills: int = 0
    interrupted: int = 0
    whole: int = 0
    slowest: tuple[float, str] = (0.0, "none")
    longest: tuple[int, str] = (0, "none")
    memory: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.cases} cases: {self.refused.total()} refused, "
            f"{self.accepted.total()} accepted, {len(self.failures)} failures"
        ]
        for kind in sorted(self.refused | self.accepted):
            refused, accepted = self.refused[kind], self.accepted[kind]
            lines.append(f"  {kind:12} {refused:5} refused {accepted:5} accepted")
        lines += [
            f"slowest: {self.slowest[0]:.2f} s, {self.slowest[1]}",
            f"longest message: {self.longest[0]} characters, {self.longest[1]}",
            f"memory: {self.memory / 2**20:.0f} MiB more than at the start",
            f"{self.exported} of the accepted were exported and read again",
            f"{self.commands} commands in processes of their own, "
            f"{self.command_refusals} of them refused",
            f"{self.kills} kills, {self.interrupted} of them within a conversion; "
            f"{self.whole} whole directories",
        ]
        return "\n".join(lines)
