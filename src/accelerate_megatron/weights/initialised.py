"""Weights made as Hugging Face initialises a new model, for a model that has none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from math import prod, sqrt

import torch

from accelerate_megatron.models.shape import ModelShape

_BLOCK_ELEMENTS = 2**20


class InitialisedSource:
    """Random weights that do not depend on the layout: each block of rows has its own seed.

    Matrices are normal with the config's `initializer_range`, norms one, biases zero. A rank
    makes the blocks of rows that its slices lie in, not whole tensors.

    Source: transformers 5.24, modeling_utils.py, `PreTrainedModel._init_weights`, and that of
        models/gpt2/modeling_gpt2.py for `narrowed`.
    """

    label = "the initialised model"

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        model: ModelShape,
        *,
        narrowed: Collection[str] = (),
        zero_rows: Mapping[str, int] | None = None,
        deviations: Mapping[str, float] | None = None,
    ) -> None:
        """Describe the weights; none is made yet.

        Args:
            shapes: The Hugging Face tensors of the model.
            model: The model.
            narrowed: Regular expressions of names whose deviation is divided by
                sqrt(2 * layers), as GPT-2's projections into the residual stream.
            zero_rows: A row that is zero, by name: the embedding of a padding token.
            deviations: Deviations by regular expressions of names, instead of all others; the
                first that matches holds.
        """
        self._shapes = shapes
        self._model = model
        self._narrowed = re.compile("|".join(narrowed)) if narrowed else None
        self._zero_rows = dict(zero_rows or {})
        self._deviations = dict(deviations or {})
        self.seed = 0

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def digest(self) -> str:
        """Return the same on every rank: the seed is the first rank's for all."""
        return "initialised"

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return `tensor[index]`, fp32, made from `seed`, the name and the rows alone."""
        shape = self._shapes[name]
        rows, *others = index
        first, last = rows.indices(shape[0])[:2]
        if len(shape) == 1:
            is_norm = name.endswith("weight")
            return torch.full((last - first,), 1.0 if is_norm else 0.0)
        height = max(1, _BLOCK_ELEMENTS // prod(shape[1:]))
        parts = []
        for block in range(first // height, -(-last // height)):
            start = block * height
            values = self._block(name, block, min(height, shape[0] - start))
            kept = slice(max(first - start, 0), min(last - start, values.shape[0]))
            parts.append(values[(kept, *others)])
        return torch.cat(parts) if parts else torch.empty(0, *shape[1:])[(slice(0, 0), *others)]

    def _block(self, name: str, block: int, num_rows: int) -> torch.Tensor:
        key = f"{self.seed} {name} {block}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        shape = self._shapes[name]
        values = torch.empty(num_rows, *shape[1:]).normal_(
            std=self._deviation(name), generator=generator
        )
        zero_row = self._zero_rows.get(name)
        height = max(1, _BLOCK_ELEMENTS // prod(shape[1:]))
        if zero_row is not None and zero_row // height == block:
            values[zero_row % height] = 0.0
        return values

    def _deviation(self, name: str) -> float:
        for pattern, deviation in self._deviations.items():
            if re.fullmatch(pattern, name):
                return deviation
        deviation = self._model.initializer_range
        if self._narrowed is not None and self._narrowed.fullmatch(name):
            return deviation / sqrt(2 * self._model.num_layers)
        return deviation
