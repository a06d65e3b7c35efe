"""The import hook: `megatron.core` modules are rewritten (on the CPU) and patched as they load.

Nothing is written: neither a changed file nor the bytecode of a changed module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader

from accelerate_megatron.engine.patches import Patch, Surroundings, patches_of
from accelerate_megatron.engine.retarget import facade
from accelerate_megatron.engine.retarget.placeholder import Placeholder
from accelerate_megatron.engine.retarget.rewriting import may_match, rewrite
from accelerate_megatron.engine.retarget.rules import DEVICE_NAME, PLACEHOLDER_NAME

PACKAGE = "megatron.core"

_EXPECTED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning),
    (r"absl\.logging is not installed", UserWarning),
    (r"The following imports from `dynamic_context\.py` will be removed", DeprecationWarning),
    (r"The 'megatron\.core\.transformer\.custom_layers", DeprecationWarning),
    # Of its source, which is compiled each time; before Python 3.12 a DeprecationWarning.
    (r".*invalid escape sequence", SyntaxWarning),
    (r".*invalid escape sequence", DeprecationWarning),
    # torch's own, where Megatron-Core asks it for torch.compile:
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
)
"""What is said while Megatron-Core is imported, and a user can do nothing about."""


class RetargetFinder(importlib.abc.MetaPathFinder):
    """Let the other finders find `megatron.core` modules, and load them in our way."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec that the next finder gives, with our loader in it."""
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        spec = self._spec_of_the_others(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            patches = patches_of(fullname, self.surroundings)
            loader = _RewritingLoader if self.surroundings.device_type == "cpu" else _PatchingLoader
            spec.loader = loader(spec.loader.name, spec.loader.path, patches, self.surroundings)
        return spec

    def _spec_of_the_others(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _PatchingLoader(SourceFileLoader):
    """Run a module as it is, then apply its patches."""

    def __init__(
        self, fullname: str, path: str, patches: Sequence[Patch], surroundings: Surroundings
    ) -> None:
        super().__init__(fullname, path)
        self._patches = patches
        self._surroundings = surroundings

    def exec_module(self, module: types.ModuleType) -> None:
        with warnings.catch_warnings():
            for message, category in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            super().exec_module(module)
        for patch in self._patches:
            patch.apply(module, self._surroundings)


class _RewritingLoader(_PatchingLoader):
    """Run a module with every use of CUDA in it rewritten, then apply its patches."""

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[DEVICE_NAME] = facade.device
        module.__dict__[PLACEHOLDER_NAME] = Placeholder
        super().exec_module(module)

    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if not may_match(source):
            return super().get_code(fullname)  # with the bytecode in __pycache__, if there is any
        tree, _ = rewrite(source, module=fullname, path=path)
        return compile(tree, path, "exec", dont_inherit=True)

    def set_data(self, *_bytecode_file: object, **_mode: object) -> None:
        """Write no bytecode, so that a run leaves no trace on disk."""
