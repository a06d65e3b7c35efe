"""What a patch is: a change to one symbol of Megatron-Core that checks what it changes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any

from accelerate_megatron.engine.versions import (
    FIRST_SUPPORTED,
    FIRST_UNKNOWN,
    SUPPORTED_RANGE,
    Version,
)
from accelerate_megatron.errors import EngineError


class When(Enum):
    """Where a patch is needed."""

    NO_CUDA = "the engine runs on the CPU"
    GLOO = "the engine runs on the CPU, where collectives are gloo's"
    NO_TRANSFORMER_ENGINE = "Transformer Engine is missing, or the engine runs on the CPU"
    NO_FUSED_ADAM = "neither Transformer Engine nor Apex is there, or the engine runs on the CPU"
    ALWAYS = "everywhere: a fault of Megatron-Core itself"


@dataclass(frozen=True)
class Surroundings:
    """What decides which patches are needed.

    Attributes:
        device_type: "cpu" or "cuda".
        version: The megatron-core that is imported.
        has_transformer_engine: Whether Transformer Engine is installed.
        has_apex: Whether Apex is installed.
    """

    device_type: str
    version: Version
    has_transformer_engine: bool
    has_apex: bool

    @classmethod
    def here(cls, device_type: str, version: Version) -> Surroundings:
        """Return the surroundings of this process."""
        return cls(
            device_type=device_type,
            version=version,
            has_transformer_engine=find_spec("transformer_engine") is not None,
            has_apex=find_spec("apex") is not None,
        )

    def are(self, when: When) -> bool:
        """Return whether `when` describes these surroundings."""
        match when:
            case When.NO_CUDA | When.GLOO:
                return self.device_type == "cpu"
            case When.NO_TRANSFORMER_ENGINE:
                # On the CPU Megatron-Core's imports of both are refused (retarget/rules.py).
                return self.device_type == "cpu" or not self.has_transformer_engine
            case When.NO_FUSED_ADAM:
                return self.device_type == "cpu" or not (
                    self.has_transformer_engine or self.has_apex
                )
            case When.ALWAYS:
                return True


@dataclass(frozen=True)
class Patch:
    """One symbol of Megatron-Core that is replaced right after its module was executed.

    Attributes:
        module: The module of Megatron-Core that defines the symbol.
        symbol: The name in it; "Class.method" for a method.
        why: What goes wrong without the patch, where.
        when: Where the patch is needed.
        replace: Returns the replacement, given what is there.
        parameters: The parameter names the symbol must have, for a function; None skips this.
        may_be: What else must hold of the symbol, as a predicate on what is there (None when
            the name is missing), and `may_be_text` says it.
        since: First version that needs the patch.
        before: First version that no longer does.
    """

    module: str
    symbol: str
    why: str
    when: When
    replace: Callable[[Any], Any]
    parameters: tuple[str, ...] | None = None
    may_be: Callable[[Any], bool] | None = None
    may_be_text: str = ""
    since: Version = FIRST_SUPPORTED
    before: Version = FIRST_UNKNOWN

    @property
    def name(self) -> str:
        """The symbol with its module, without the part that all have in common."""
        return f"{self.module.removeprefix('megatron.core.')}.{self.symbol}"

    def is_needed(self, surroundings: Surroundings) -> bool:
        """Return whether the patch applies to this version in these surroundings."""
        return self.since <= surroundings.version < self.before and surroundings.are(self.when)

    def apply(self, module: types.ModuleType, surroundings: Surroundings) -> None:
        """Replace the symbol in `module`.

        Raises:
            EngineError: What is there is not what the patch was written for.
        """
        owner, leaf = self._owner(module, surroundings.version)
        found = getattr(owner, leaf, None)
        self._check(found, surroundings.version)
        setattr(owner, leaf, self.replace(found))

    def _owner(self, module: types.ModuleType, version: Version) -> tuple[Any, str]:
        *path, leaf = self.symbol.split(".")
        owner: Any = module
        for name in path:
            if not hasattr(owner, name):
                raise self._error(version, f"{owner.__name__} has no {name}")
            owner = getattr(owner, name)
        return owner, leaf

    def _check(self, found: Any, version: Version) -> None:
        if self.parameters is not None:
            if found is None:
                raise self._error(version, "it is not there")
            names = tuple(inspect.signature(found).parameters)
            if names != self.parameters:
                raise self._error(
                    version, f"its parameters are {names}, the patch knows {self.parameters}"
                )
        if self.may_be is not None and not self.may_be(found):
            raise self._error(version, f"it is {found!r}, the patch expects {self.may_be_text}")

    def _error(self, version: Version, problem: str) -> EngineError:
        return EngineError(
            f"The patch of {self.module}.{self.symbol} does not fit Megatron-Core {version}: "
            f"{problem}. It is needed because {self.why}. Please report this, and "
            f"install another version of megatron-core {SUPPORTED_RANGE}."
        )
