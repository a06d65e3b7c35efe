"""The rewrite rules: what each one changes, what none of them touches, how often they match."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from accelerate_megatron.engine.retarget import facade, report, rewriting
from accelerate_megatron.engine.retarget.expected_hits import EXPECTED_HITS
from accelerate_megatron.engine.retarget.placeholder import Placeholder
from accelerate_megatron.engine.retarget.rules import DEVICE_NAME, PLACEHOLDER_NAME, RULES
from accelerate_megatron.engine.versions import core_folder, read_version
from accelerate_megatron.errors import UnsupportedError


@pytest.fixture(scope="module")
def changes() -> list[report.Rewrite]:
    """Return every rewritten place of the installed Megatron-Core."""
    return report.rewrites()


PAGED_STASH = "megatron.core.transformer.moe.paged_stash"


def rewritten(source: str, module: str = "megatron.core.example") -> str:
    tree, _ = rewriting.rewrite(source.encode(), module=module, path="example.py")
    return ast.unparse(tree)


REWRITES = [
    ("cuda-import", "from torch.cuda import Event, stream as s", "Event, s = (D.Event, D.stream)"),
    ("cuda-import", "import torch.cuda.nvtx as nvtx", "nvtx = D.nvtx"),
    ("gpu-package-import", "import triton", "raise ModuleNotFoundError("),
    ("gpu-package-import", "from apex.optimizers import FusedAdam", "raise ModuleNotFoundError("),
    ("torch-cuda", "x = torch.cuda.current_device()", "x = D.current_device()"),
    ("torch-cuda", "def f(s: torch.cuda.Stream): pass", "def f(s: D.Stream):\n    pass"),
    ("torch-cuda", "torch.cuda.limit = 1", "D.limit = 1"),
    ("torch-compile", "fuse = torch.compile", "fuse = D.uncompiled"),
    ("torch-compile", "torch.compile(f, dynamic=True)", "D.uncompiled(f, dynamic=True)"),
    ("device-string", "x.to('cuda')", "x.to('cpu')"),
    ("device-string", "torch.zeros(1, device='cuda:0')", "torch.zeros(1, device='cpu')"),
    ("device-string", "torch.autocast('cuda', dtype=t)", "torch.autocast('cpu', dtype=t)"),
    ("device-string", "x.device.type == 'cuda'", "x.device.type == 'cpu'"),
    ("device-string", "def f(device='cuda'): pass", "def f(device='cpu'):\n    pass"),
    ("device-fstring", "torch.device(f'cuda:{rank}')", "torch.device('cpu')"),
    ("indexed-device", "torch.device('cuda', index)", "torch.device('cpu')"),
    ("tensor-type-string", "p.type() == 'torch.cuda.HalfTensor'", "p.type() == 'torch.HalfTensor'"),
    ("cuda-call", "x = a.b.cuda(non_blocking=True)", "x = a.b"),
    ("is-cuda", "if x[0].is_cuda: pass", "if x[0].device.type == 'cpu':\n    pass"),
    ("pin-memory-argument", "f(n, pin_memory=flag)", "f(n, pin_memory=False)"),
    ("pin-memory-call", "y = x.cpu().pin_memory()", "y = x.cpu()"),
    ("record-stream", "x.record_stream(s)", "None"),
]


@pytest.mark.parametrize(
    ("rule", "before", "after"), REWRITES, ids=[f"{row[0]}: {row[1]}" for row in REWRITES]
)
def test_a_rule_rewrites_what_it_is_for(rule, before, after):
    _, hits = rewriting.rewrite(before.encode(), module="megatron.core.example", path="example.py")

    assert rewritten(before).startswith(after.replace("D.", f"{DEVICE_NAME}."))
    assert rule in {hit.rule.name for hit in hits}


def test_every_rule_has_an_example_here_or_below():
    shown = {rule for rule, _, _ in REWRITES} | {"triton-placeholder"}

    assert shown == {rule.name for rule in RULES}


UNTOUCHED = [
    "import torch",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "major = torch.version.cuda.split('.')[0]",
    "stream = cupy.cuda.ExternalStream(pointer)",
    "name = 'cuda_graph_impl'",
    "log('torch.cuda.synchronize', logger)",
    "pattern = re.compile('x')",
    "run = torch.compiler.disable(run)",
    "message = f'cuda{index}'",
    "message = f'cuda: {count} buffers'",
    "tensor.is_cuda = True",
    "from .fused_pin_memory import record_stream",
    "from megatron.core.transformer_engine import triton",
    "def pin_memory(self): return self.pin_memory",
    "'''Runs on cuda, with pin_memory=True.'''",
]


@pytest.mark.parametrize("source", UNTOUCHED)
def test_what_only_looks_like_a_device_is_left_alone(source):
    assert rewritten(source) == ast.unparse(ast.parse(source))


def test_triton_is_bound_to_a_placeholder_in_the_one_module_that_needs_the_name():
    source = "import triton\nimport triton.language as tl"

    assert rewritten(source, PAGED_STASH) == (
        f"triton = {PLACEHOLDER_NAME}('triton')\ntl = {PLACEHOLDER_NAME}('triton.language')"
    )
    assert "raise ModuleNotFoundError" in rewritten(source)


def test_a_trigger_in_a_decorator_is_found():
    source = "@decorate(device='cuda')\ndef f():\n    return 1"

    assert "'cpu'" in rewritten(source)


def test_new_nodes_stand_where_the_old_ones_stood():
    source = "x = [\n    1,\n    torch.cuda.current_device(),\n    f'cuda:{i}',\n    y.is_cuda,\n]"

    tree, _ = rewriting.rewrite(source.encode(), module="m", path="example.py")

    assert [item.lineno for item in tree.body[0].value.elts] == [2, 3, 4, 5]
    assert tree.body[0].end_lineno == 6


def test_the_installed_version_has_the_expected_number_of_hits_for_each_rule(changes):
    version = str(read_version(core_folder()))
    assert version in EXPECTED_HITS, f"add the hits of megatron-core {version} to expected_hits.py"

    hits = Counter(change.rule for change in changes)

    assert {rule.name: hits[rule.name] for rule in RULES} == EXPECTED_HITS[version]


@pytest.mark.parametrize("version", EXPECTED_HITS)
def test_only_the_triton_placeholder_may_have_no_hit(version):
    unused = {rule for rule, count in EXPECTED_HITS[version].items() if count == 0}

    assert unused <= {"triton-placeholder"}
    assert (unused == set()) == (version >= "0.18")
    assert set(EXPECTED_HITS[version]) == {rule.name for rule in RULES}


def test_passing_over_statements_without_a_trigger_misses_nothing(monkeypatch):
    folder = core_folder() / "tensor_parallel"
    quick = report.rewrites(folder)
    assert len(quick) > 50

    monkeypatch.setattr(rewriting, "TRIGGER", re.compile(rb"^", re.MULTILINE))

    assert report.rewrites(folder) == quick


def test_every_rewritten_module_compiles(changes):
    for path in {change.path for change in changes}:
        source = Path(path).read_bytes()
        tree, _ = rewriting.rewrite(source, module="megatron.core.any", path=path)
        compile(tree, path, "exec", dont_inherit=True)


def test_the_report_shows_each_place_as_the_file_has_it(changes):
    for change in changes:
        lines = Path(change.path).read_text(encoding="utf-8").splitlines()
        assert change.before.splitlines()[0] in lines[change.line - 1]
        assert change.before != change.after
    assert json.loads(json.dumps([dataclasses.asdict(change) for change in changes[:3]]))


def test_the_report_names_packages_without_init(changes):
    assert {change.module for change in changes} >= {
        "megatron.core.optimizer",
        "megatron.core.tensor_parallel.random",
    }


def test_the_device_of_the_facade_is_the_cpu():
    assert facade.device.current_device() == torch.device("cpu")
    assert torch.zeros(1, device=facade.device.current_device()).device.type == "cpu"
    assert facade.device.is_available() is False
    assert facade.device.memory_allocated() == 0


def test_streams_and_events_of_the_facade_are_always_done():
    stream, event = facade.device.Stream(), facade.device.Event(enable_timing=True)

    with facade.device.stream(stream):
        event.record(stream)
    stream.wait_event(event)

    assert stream.query()
    assert event.query()
    assert event.elapsed_time(stream.record_event()) == 0.0


def test_the_random_state_of_the_facade_is_torchs_own():
    with torch.random.fork_rng(devices=[]):
        facade.device.manual_seed(7)
        state = facade.device.get_rng_state("cuda")
        first = torch.rand(3)
        facade.device.random.set_rng_state(state, "cuda")

        assert torch.equal(torch.rand(3), first)
        assert facade.device.default_generators[0] is torch.default_generator


def test_the_stand_in_for_torch_compile_gives_back_the_function():
    assert facade.device.uncompiled(changes) is changes
    assert facade.device.uncompiled(dynamic=True)(changes) is changes


def test_other_names_of_the_facade_are_those_of_torch_cuda():
    assert facade.device.CUDAGraph is torch.cuda.CUDAGraph
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = facade.device.no_such_thing


def test_a_placeholder_can_decorate_but_not_be_launched():
    triton = Placeholder("triton")

    @triton.jit
    def kernel(pointer, size: triton.language.constexpr):
        raise AssertionError

    with pytest.raises(UnsupportedError, match=r"kernel is a triton kernel.*on the CPU"):
        kernel[(1,)](None, size=1)


def test_a_placeholder_is_no_module():
    assert not isinstance(Placeholder("triton"), types.ModuleType)
    assert not hasattr(Placeholder("triton"), "__path__")
