"""Which megatron-core versions are known, and which one is about to be imported.

The version is read from the files that would be imported, not from the installed
metadata: a checkout on `PYTHONPATH` wins over the wheel, and its files are what the
rewrite rules and the patches meet.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate_megatron.errors import EngineError


@dataclass(frozen=True, order=True)
class Version:
    """A megatron-core version. A pre-release compares equal to its release."""

    major: int
    minor: int
    patch: int
    pre_release: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}{self.pre_release}"


FIRST_SUPPORTED = Version(0, 16, 1)
FIRST_UNKNOWN = Version(0, 20, 0)
"""Every version from the first supported up to this one is of a minor version we know."""

SUPPORTED_RANGE = ">=0.16.1,<0.20"
_CURE = f"Install a supported one: `pip install 'megatron-core{SUPPORTED_RANGE}'`."


def core_folder() -> Path:
    """Return the folder of the `megatron.core` that would be imported. Imports nothing of it.

    Raises:
        EngineError: megatron-core is not installed.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise EngineError(f"Megatron-Core is not installed. {_CURE}")
    return Path(spec.origin).parent


def read_version(folder: Path) -> Version:
    """Return the version that the `package_info.py` in `folder` states, without running it.

    Raises:
        EngineError: There is no such file, or it does not state MAJOR, MINOR and PATCH.
    """
    path = folder / "package_info.py"
    try:
        stated = _assigned_constants(path.read_text(encoding="utf-8"))
        return Version(
            stated["MAJOR"], stated["MINOR"], stated["PATCH"], stated.get("PRE_RELEASE", "")
        )
    except (FileNotFoundError, KeyError) as error:
        raise EngineError(
            f"The version of Megatron-Core is unknown: {path} is missing or states no MAJOR, MINOR "
            f"and PATCH ({error}). {_CURE}"
        ) from error


def check_version(version: Version) -> None:
    """Check that `version` is of a minor version that the rules and patches were checked on.

    Raises:
        EngineError: It is not.
    """
    if not FIRST_SUPPORTED <= version < FIRST_UNKNOWN:
        raise EngineError(
            f"Megatron-Core {version} was found; accelerate-megatron supports {SUPPORTED_RANGE}. "
            "It changes parts of Megatron-Core while they are imported, and was not checked "
            f"against this version. {_CURE}"
        )


def _assigned_constants(source: str) -> dict[str, Any]:
    """Return the names that top-level statements of `source` assign a constant to."""
    found = {}
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                found[name] = value
    return found
