"""What the engine changes in Megatron-Core: as data, and without importing Megatron-Core.

`accelerate-megatron env --retarget` prints it. What is *not* here: any layout of it.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accelerate_megatron.engine.patches import PATCHES, Surroundings
from accelerate_megatron.engine.retarget.rewriting import Hit, may_match, rewrite
from accelerate_megatron.engine.versions import core_folder, read_version


@dataclass(frozen=True)
class Rewrite:
    """One place where a rule changes a module.

    Attributes:
        module: The module's name.
        path: Its file.
        line: The first line of what is changed.
        rule: The rule's name.
        before: What is changed, as the file has it.
        after: What is put there.
    """

    module: str
    path: str
    line: int
    rule: str
    before: str
    after: str


@dataclass(frozen=True)
class PatchSummary:
    """One patch, in words.

    Attributes:
        symbol: The full name of what is replaced.
        since: First version of megatron-core that is patched.
        before: First version that no longer is.
        when: Where the patch is needed.
        why: What goes wrong without it.
        is_applied: Whether it applies to the installed version on the given device.
    """

    symbol: str
    since: str
    before: str
    when: str
    why: str
    is_applied: bool


def rewrites(folder: Path | None = None) -> list[Rewrite]:
    """Return every change that the rules make to `megatron.core` on the CPU, in file order.

    Args:
        folder: The folder of `megatron.core`; by default the installed one's.

    Raises:
        EngineError: Megatron-Core is not installed.
    """
    found = []
    for module, path, hits in _hits(folder):
        lines = path.read_bytes().splitlines(keepends=True)
        for hit in hits:
            found.append(
                Rewrite(
                    module=module,
                    path=str(path),
                    line=_position(hit)[0],
                    rule=hit.rule.name,
                    before=_source_of(hit, lines),
                    after=ast.unparse(hit.after),
                )
            )
    return found


def patches(device_type: str) -> list[PatchSummary]:
    """Return the patches, saying of each whether it applies here on `device_type`.

    Raises:
        EngineError: Megatron-Core is not installed.
    """
    surroundings = Surroundings.here(device_type, read_version(core_folder()))
    return [
        PatchSummary(
            symbol=f"{patch.module}.{patch.symbol}",
            since=str(patch.since),
            before=str(patch.before),
            when=patch.when.value,
            why=patch.why,
            is_applied=patch.is_needed(surroundings),
        )
        for patch in PATCHES
    ]


def _hits(folder: Path | None) -> Iterator[tuple[str, Path, list[Hit]]]:
    """Yield each module with hits, its file and the hits, in the order of the files' names."""
    root = core_folder() if folder is None else folder
    for path in sorted(root.rglob("*.py")):
        source = path.read_bytes()
        if may_match(source):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(("megatron.core", *parts)).removesuffix(".__init__")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the text of Megatron-Core
                _, hits = rewrite(source, module=module, path=str(path))
            yield module, path, sorted(hits, key=_position)


def _position(hit: Hit) -> tuple[int, int]:
    node = hit.before
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _source_of(hit: Hit, lines: list[bytes]) -> str:
    """Return the text of what was replaced. Not `ast.get_source_segment`: it is quadratic."""
    first, start = _position(hit)
    last: int = hit.before.end_lineno  # type: ignore[attr-defined]
    end: int = hit.before.end_col_offset  # type: ignore[attr-defined]
    inside = lines[first - 1 : last]
    inside[-1] = inside[-1][:end]
    inside[0] = inside[0][start:]
    return b"".join(inside).decode("utf-8")
