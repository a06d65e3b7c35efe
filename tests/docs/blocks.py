"""Reads the code blocks of the documentation, each with the mark that says how it is run.

The mark is a comment in the line before the block:

    <!-- file: NAME -->               its text is the file NAME in the folder of the page
    <!-- run -->                      it is run, after the blocks above it, in that folder
    <!-- run: same output -->         and prints what stands below the command
    <!-- run after: SETUP -->         after the lines of SETUP (setups.py), which make what it needs
    <!-- run after: SETUP on 2 ranks -->
    <!-- run by: PATH::NAME -->       a test or script does what it says
    <!-- GPU -->                      it needs GPUs; the launcher is asked what it would start
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_MARK = re.compile(
    r"(?P<kind>file: |run after: |run by: |run: same output$|run$|GPU$)"
    r"(?P<what>.*?)(?: on (?P<ranks>\d) ranks)?$"
)
_COMMAND = re.compile(r"(?:\$ )?(accelerate-megatron|python|torchrun|sbatch|pip|make|docker) ")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    kind: str | None
    """"file", "run after", ... without the colon; None when the block has no mark."""
    what: str = ""
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def needs_mark(self) -> bool:
        """Whether it is code that a reader may run, rather than a drawing or an output."""
        if self.language in ("python", "console", "bash", "sh", "diff"):
            return True
        return not self.language and bool(_COMMAND.match(self.text))

    def commands(self) -> list[tuple[list[str], str]]:
        """Return the words of each command, and the output that stands below it."""
        found: list[tuple[str, list[str]]] = []
        has_prompts = self.text.startswith("$ ")
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ ") or not has_prompts:
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
        return [(shlex.split(words, comments=True), "\n".join(output)) for words, output in found]

    def python(self) -> str:
        """Return the code; of a diff, what there is after the change."""
        if self.language != "diff":
            return self.text
        kept = [line for line in self.text.splitlines() if not line.startswith("-")]
        return "\n".join(line[1:] for line in kept) + "\n"


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page from top to bottom.

    Raises:
        ValueError: A mark is none that is known.
    """
    source = page.read_text(encoding="utf-8")
    return [_block(page, source, match) for match in _BLOCK.finditer(source)]


def _block(page: Path, source: str, match: re.Match[str]) -> Block:
    line = source.count("\n", 0, match.start("text")) + 1
    block = Block(page, line, match["language"], match["text"], None)
    if match["mark"] is None or match["mark"].startswith("results:"):
        return block
    mark = _MARK.match(match["mark"])
    if mark is None:
        raise ValueError(f"{block.name}: <!-- {match['mark']} --> is no mark; see {__file__}.")
    return Block(
        page,
        line,
        block.language,
        block.text,
        mark["kind"].rstrip(": "),
        mark["what"],
        int(mark["ranks"] or 1),
    )
