"""What stands in for `triton` inside a Megatron-Core module that cannot do without the name."""

from __future__ import annotations

from typing import Any, NoReturn

from accelerate_megatron.errors import UnsupportedError


class Placeholder:
    """A package that is not there: it can be named and decorate, but not run.

    Attributes are placeholders as well. As a decorator (`@triton.jit`) it returns a
    function that says what is missing when it is launched (`kernel[grid](...)`).
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("_"):
            raise AttributeError(name)
        return Placeholder(f"{self._path}.{name}")

    def __call__(self, *args: Any, **_options: Any) -> Placeholder:
        """Return what the decorator `@triton.jit` leaves of a function."""
        function = args[0] if args else None
        return Placeholder(getattr(function, "__qualname__", self._path))

    def __getitem__(self, _grid: object) -> NoReturn:
        raise UnsupportedError(
            f"{self._path} is a triton kernel; this process runs Megatron-Core on the CPU. "
            "Switch off the setting that needs it (paged stashing of MoE activations)."
        )
