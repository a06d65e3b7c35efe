"""docs/design.md describes the code that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "accelerate_megatron"
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def drawn_files() -> set[str]:
    """Return the files of the tree, as paths below the package."""
    tree = DESIGN.split("```")[1]
    files = set()
    folder = ""
    for line in tree.splitlines():
        if found := re.match(r"  (\w+/)", line):
            folder = found[1]
        elif re.match(r"  \w", line):
            folder = ""
        files |= {folder + name for name in re.findall(r"\b(\w+\.py)\b", line)}
    return files


def test_the_tree_is_the_one_on_disk() -> None:
    on_disk = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "retarget/" not in path.as_posix().replace("cli/retarget", "")
        and "/patches/" not in path.as_posix()
    }
    without_packages = {name for name in on_disk if not name.endswith("/__init__.py")}

    drawn = {name for name in drawn_files() if not name.endswith("/__init__.py")}

    assert drawn == without_packages


def test_every_file_that_the_text_names_exists() -> None:
    text = DESIGN.split("```")[2]
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md))", text))

    missing = {name for name in named if not ((SOURCE / name).exists() or (ROOT / name).exists())}

    assert missing == set()


def test_every_module_but_the_engine_is_kept_from_importing_megatron() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = project.split("Only engine imports megatron")[1].split("forbidden_modules")[0]
    covered = set(re.findall(r'"accelerate_megatron\.(\w+)"', contract))

    top_level = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    left_out = {"__init__", "__main__", "__pycache__", "engine"}

    assert covered == top_level - left_out
