"""How patches are applied: where, in which versions, and what they refuse to change."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any

import pytest

from accelerate_megatron.engine.patches import PATCHES, Patch, Surroundings, When, patches_of
from accelerate_megatron.engine.versions import Version, core_folder, read_version
from accelerate_megatron.errors import EngineError
from tests.helpers.ranks import run_ranks

INSTALLED = read_version(core_folder())
HERE = Surroundings("cpu", INSTALLED, has_transformer_engine=False, has_apex=False)
NEEDED = [patch for patch in PATCHES if patch.is_needed(HERE)]


def patch_of(function_of_upstream=lambda found: "replaced", **changes: Any) -> Patch:
    settings = {
        "module": "megatron.core.example",
        "symbol": "Thing.method",
        "why": "it is wrong",
        "when": When.ALWAYS,
        "replace": function_of_upstream,
    }
    return Patch(**{**settings, **changes})


def module_with(**members: object) -> types.ModuleType:
    module = types.ModuleType("megatron.core.example")
    module.__dict__.update(members)
    return module


class Thing:
    def method(self, size):
        raise AssertionError


def test_a_patch_gives_the_upstream_object_to_its_replacement():
    module = module_with(double=lambda x: 2 * x)

    patch_of(lambda found: lambda x: found(x) + 1, symbol="double").apply(module, HERE)

    assert module.double(3) == 7


MISFITS = [
    pytest.param({"symbol": "Other.method"}, "has no Other", id="class missing"),
    pytest.param({"symbol": "function", "parameters": ("x",)}, "not there", id="function missing"),
    pytest.param({"parameters": ("self", "length")}, r"\('self', 'size'\)", id="parameters"),
    pytest.param(
        {"symbol": "FLAG", "may_be": lambda found: found is False, "may_be_text": "False"},
        "it is True, the patch expects False",
        id="value",
    ),
]


@pytest.mark.parametrize(("changes", "problem"), MISFITS)
def test_a_patch_refuses_what_it_was_not_written_for(changes, problem):
    module = module_with(Thing=Thing, FLAG=True)

    with pytest.raises(EngineError, match=f"does not fit Megatron-Core {INSTALLED}.*{problem}"):
        patch_of(**changes).apply(module, HERE)


def test_a_patch_applies_from_its_first_version_to_before_its_last():
    patch = patch_of(since=Version(0, 17, 0), before=Version(0, 19, 0))

    versions = [Version(0, 16, 1), Version(0, 17, 0), Version(0, 18, 2, "rc1"), Version(0, 19, 0)]

    needed = [patch.is_needed(Surroundings("cpu", version, False, False)) for version in versions]
    assert needed == [False, True, True, False]


def needed_with(device_type: str, *, te: bool, apex: bool) -> set[When]:
    surroundings = Surroundings(device_type, Version(0, 16, 1), te, apex)
    return {patch.when for patch in PATCHES if patch.is_needed(surroundings)}


def test_with_cuda_only_what_is_missing_is_patched():
    assert needed_with("cuda", te=True, apex=True) == {When.ALWAYS}
    assert needed_with("cuda", te=False, apex=True) == {When.ALWAYS, When.NO_TRANSFORMER_ENGINE}
    assert needed_with("cuda", te=False, apex=False) == {
        When.ALWAYS,
        When.NO_TRANSFORMER_ENGINE,
        When.NO_FUSED_ADAM,
    }


def test_what_the_layers_of_the_spec_need_is_patched_beside_transformer_engine_too():
    # The layers are Megatron's local ones whatever is installed, and return their bias.
    with_everything = Surroundings("cuda", INSTALLED, has_transformer_engine=True, has_apex=True)

    needed = patches_of("megatron.core.tensor_parallel.random", with_everything)

    assert [patch.symbol for patch in needed] == ["checkpoint"]


def test_on_the_cpu_an_installed_transformer_engine_changes_nothing():
    assert needed_with("cpu", te=True, apex=True) == needed_with("cpu", te=False, apex=False)


def test_each_patch_names_one_symbol_and_a_reason():
    assert len({(patch.module, patch.symbol) for patch in PATCHES}) == len(PATCHES)
    assert all(patch.module.startswith("megatron.core.") and patch.why for patch in PATCHES)
    assert set(patches_of("megatron.core.optimizer", HERE)) == {
        patch for patch in NEEDED if patch.module == "megatron.core.optimizer"
    }


def is_ours(function: Any) -> bool:
    code = getattr(function, "__code__", None)  # its module is upstream's after functools.wraps
    return code is not None and "accelerate_megatron" in code.co_filename


def replacements_on_a_rank() -> dict[str, str]:
    """Return where the functions and classes come from that stand at the patched places."""
    origins = {}
    for patch in NEEDED:
        value: Any = importlib.import_module(patch.module)
        for name in patch.symbol.split("."):
            value = getattr(value, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            origins[patch.name] = "accelerate_megatron" if is_ours(value) else value.__module__
    return origins


def test_every_patched_function_and_class_is_in_place():
    origins = run_ranks(replacements_on_a_rank, num_ranks=1)[0]

    upstream = {name for name, module in origins.items() if module.startswith("megatron")}
    assert upstream == set()
    assert len(origins) > 8


def unpatched_copies_on_a_rank() -> list[str]:
    for name in ("models.bert.bert_model", "transformer.moe.moe_layer", "ssm.mamba_block"):
        importlib.import_module(f"megatron.core.{name}")
    functions = {(patch.module, patch.symbol) for patch in NEEDED if "." not in patch.symbol}
    return [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core")
        for attribute, value in vars(module).items()
        if inspect.isfunction(value)
        and not is_ours(value)
        and (value.__module__, value.__qualname__) in functions
    ]


def test_no_module_holds_an_unpatched_copy():
    assert run_ranks(unpatched_copies_on_a_rank, num_ranks=1) == [[]]
