"""The import hook in processes that begin with it: what it changes, leaves, and refuses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from accelerate_megatron.engine import activate, default_device
from accelerate_megatron.engine.versions import core_folder, read_version

REPOSITORY = Path(__file__).resolve().parents[2]

MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.distributed",
    "megatron.core.transformer.moe.moe_layer",
)

WITHOUT_CUDA = """
import importlib, json, logging, sys, traceback, warnings

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name, name="triton")

sys.meta_path.insert(0, NoTriton())
import torch
before = {name: id(value) for name, value in vars(torch.cuda).items()}
warnings.simplefilter("error")

from accelerate_megatron import engine
engine.activate("cpu")
engine.activate("cpu")
for name in %r:
    importlib.import_module(name)

class NoNumber:
    def __gt__(self, other):
        return True

scaler = sys.modules["megatron.core.optimizer.grad_scaler"].ConstantGradScaler
try:
    scaler(NoNumber())
except (RuntimeError, TypeError) as error:
    frame = traceback.extract_tb(error.__traceback__)[-1]
print(json.dumps({
    "device": str(scaler(2.0)._scale.device),
    "changed in torch.cuda": [n for n, i in before.items() if id(getattr(torch.cuda, n)) != i],
    "new in torch.cuda": [
        name for name, value in vars(torch.cuda).items()
        if name not in before and value is not sys.modules.get(f"torch.cuda.{name}")
    ],
    "has triton": "triton" in sys.modules,
    "has a compiler": "torch._inductor" in sys.modules,
    "frame": [frame.filename, frame.name, frame.line],
    "active": engine.active_device(),
}))
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


# Importing torch takes a second; a fork of a process that has done so is as good as new for us.
SERVER = """
import json, os, sys, traceback
import accelerate_megatron.engine

for line in sys.stdin:
    code, path, out, err = json.loads(line)
    child = os.fork()
    if child == 0:
        for name, stream in ((out, 1), (err, 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        if path:
            sys.path.insert(0, path)
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    search = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "PYTHONPATH": search.rstrip(os.pathsep)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.fixture(scope="module")
def run(server, tmp_path_factory) -> Callable[..., Result]:
    """Return a function that runs code in a process that has imported the engine, and no more."""

    def run(code: str, path: Path | None = None) -> Result:
        folder = tmp_path_factory.mktemp("run")
        out, err = folder / "out", folder / "err"
        request = [code, path and str(path), str(out), str(err)]
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return Result(int(server.stdout.readline()), out.read_text(), err.read_text())

    return run


@pytest.fixture(scope="module")
def error_of(run) -> Callable[..., str]:
    """Return a function that runs code which must fail, and gives the line of its error."""

    def error_of(code: str, path: Path) -> str:
        result = run(code, path)
        assert result.code != 0, result.out
        return result.err.strip().splitlines()[-1]

    return error_of


@pytest.fixture(scope="module")
def core_copy(tmp_path_factory) -> Path:
    """Return a folder with a copy of `megatron.core` that has no bytecode yet."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(core_folder(), folder / "megatron" / "core", ignore=ignored)
    return folder


def files_below(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def without_cuda(run, core_copy) -> dict[str, object]:
    """Return what a process saw that imported Megatron-Core for the CPU, triton being blocked."""
    written_before = files_below(core_copy)
    result = run(WITHOUT_CUDA % (MODULES,), core_copy)
    assert result.code == 0, result.err
    facts = json.loads(result.out.splitlines()[-1])
    return {**facts, "is untouched": files_below(core_copy) == written_before}


def test_megatron_works_on_the_cpu(without_cuda):
    assert without_cuda["active"] == "cpu"
    assert without_cuda["device"] == "cpu"


def test_torch_is_not_patched(without_cuda):
    assert without_cuda["changed in torch.cuda"] == []
    assert without_cuda["new in torch.cuda"] == []


def test_triton_is_not_needed(without_cuda):
    assert without_cuda["has triton"] is False


def test_the_compiler_of_torch_is_not_imported(without_cuda):
    assert without_cuda["has a compiler"] is False


def test_no_file_is_written_next_to_megatron(without_cuda):
    assert without_cuda["is untouched"]


def test_a_traceback_shows_the_line_of_the_file(without_cuda):
    filename, function, line = without_cuda["frame"]

    assert filename.endswith("grad_scaler.py")
    assert function == "__init__"
    assert line == "self._scale = torch.tensor([initial_scale], dtype=torch.float, device='cuda')"


def test_with_cuda_nothing_is_rewritten_and_the_missing_adam_is_there(run):
    result = run(
        "import warnings; warnings.simplefilter('error')\n"
        "from accelerate_megatron import engine\n"
        "engine.activate('cuda')\n"
        "import megatron.core.optimizer as optimizer, megatron.core.jit as jit, torch\n"
        "import megatron.core.optimizer.grad_scaler as scaler\n"
        "names = [n for n in vars(scaler) if n.startswith('_retargeted')]\n"
        "print(names, optimizer.Adam.__module__, jit.jit_fuser is torch.compile)\n"
        "print('cuda' in scaler.MegatronGradScaler.__init__.__code__.co_consts)"
    )

    assert result.code == 0, result.err
    assert result.out.split("\n")[:2] == [
        "[] accelerate_megatron.engine.fused_adam True",
        "True",
    ]


def fake_core(folder: Path, version: str, **modules: str) -> Path:
    """Write a `megatron.core` of `version` with the given modules."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    major, minor, patch = version.split(".")
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
    )
    for name, source in modules.items():
        (core / f"{name}.py").write_text(source)
    return folder


ACTIVATE = "from accelerate_megatron import engine\nengine.activate('cpu')\n"


@pytest.mark.parametrize("version", ["0.16.0", "0.20.0", "1.0.0"])
def test_a_version_outside_the_range_is_refused_with_the_range(error_of, tmp_path, version):
    error = error_of(ACTIVATE, fake_core(tmp_path, version))

    assert f"EngineError: Megatron-Core {version} was found" in error
    assert ">=0.16.1,<0.20" in error
    assert "pip install" in error


def test_an_accelerator_names_the_version_found_and_those_needed(error_of, tmp_path):
    code = "from accelerate_megatron import Accelerator\nAccelerator(cpu=True)\n"

    error = error_of(code, fake_core(tmp_path, "0.5.0"))

    assert "Megatron-Core 0.5.0 was found; accelerate-megatron supports >=0.16.1,<0.20" in error
    assert "not installed" not in error


def test_a_new_patch_release_is_used_with_a_note_in_the_log(run, tmp_path):
    log = "import logging\nlogging.basicConfig(level='INFO')\n"

    result = run(log + ACTIVATE, fake_core(tmp_path, "0.19.99"))

    assert result.code == 0
    assert "Megatron-Core 0.19.99 is not one of the tested versions (0.16.1, " in result.err


def test_a_missing_megatron_is_named_with_the_command_that_installs_it(error_of, tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")

    error = error_of(ACTIVATE, tmp_path)

    assert "Megatron-Core is not installed" in error
    assert "pip install 'megatron-core>=0.16.1,<0.20'" in error


def test_megatron_imported_before_us_is_refused_with_the_cure(error_of, tmp_path):
    error = error_of("import megatron.core\n" + ACTIVATE, fake_core(tmp_path, "0.19.2"))

    assert "EngineError: megatron.core was imported before accelerate_megatron" in error
    assert "before the first import of megatron.core" in error


def test_with_cuda_modules_without_a_patch_may_be_imported_before_us(run, error_of, tmp_path):
    fake_core(tmp_path, "0.19.2", optimizer="")
    activate_cuda = "from accelerate_megatron import engine\nengine.activate('cuda')\n"

    assert run("import megatron.core\n" + activate_cuda, tmp_path).code == 0
    error = error_of("import megatron.core.optimizer\n" + activate_cuda, tmp_path)
    assert "such as megatron.core.optimizer" in error


def test_another_device_later_is_refused(error_of, tmp_path):
    error = error_of(ACTIVATE + "engine.activate('cuda')", fake_core(tmp_path, "0.19.2"))

    assert "already runs Megatron-Core on 'cpu' and cannot change to 'cuda'" in error


def test_a_patch_that_does_not_fit_stops_the_import_and_says_which(error_of, tmp_path):
    fake_core(tmp_path, "0.19.2", optimizer="class Adam:\n    pass\n")

    error = error_of(ACTIVATE + "import megatron.core.optimizer", tmp_path)

    assert "EngineError: The patch of megatron.core.optimizer.Adam does not fit" in error
    assert "Megatron-Core 0.19.2" in error


def test_a_version_that_is_not_stated_is_refused(error_of, tmp_path):
    folder = fake_core(tmp_path, "0.19.2")
    (folder / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\n")

    error = error_of(ACTIVATE, folder)

    assert "The version of Megatron-Core is unknown" in error
    assert "'MINOR'" in error


def test_the_version_read_from_the_files_is_the_one_megatron_states():
    assert str(read_version(core_folder())) == importlib.metadata.version("megatron-core")


def test_a_device_type_we_do_not_know_is_refused():
    with pytest.raises(ValueError, match="device_type is 'tpu'; it must be one of"):
        activate("tpu")


@pytest.mark.parametrize(
    ("has_cuda", "use_cpu", "device"),
    [(True, "", "cuda"), (True, "true", "cpu"), (True, "0", "cuda"), (False, "", "cpu")],
)
def test_the_default_device_is_cuda_unless_the_cpu_was_asked_for(
    monkeypatch, has_cuda, use_cpu, device
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)

    assert default_device() == device
