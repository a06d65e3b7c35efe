"""The package as a whole: lazy import, version, declared dependencies, what the wheel holds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import accelerate_megatron
from tests.docs.blocks import blocks_of
from tests.docs.setups import SETUPS

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "accelerate_megatron"
PUBLIC = sorted(set(accelerate_megatron.__all__) - {"__version__"})
# The three lines and the file of the report in Accelerate's tracker; the drop-in makes them ours.
BARE_SCRIPT = """from accelerate import Accelerator
accelerator = Accelerator()
print(accelerator.distributed_type)
"""
BARE_CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
megatron_lm_config: {megatron_lm_tp_degree: 1, megatron_lm_gradient_clipping: 1.0}
num_processes: 1
use_cpu: true
"""
CHANGED_FILES = """
import base64, hashlib
from importlib.metadata import files

for file in files("megatron-core"):
    if file.hash is not None:
        digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            print(file)
"""
PACKAGE_OF = {"megatron": "megatron-core", "yaml": "pyyaml"}


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_import_brings_nothing_but_the_standard_library():
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import accelerate_megatron\n"
        "brought = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*brought - set(sys.stdlib_module_names))\n"
    )

    assert run_python(code).split() == ["accelerate_megatron"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_found_where_it_lives(name):
    value = getattr(accelerate_megatron, name)

    assert value.__name__ == name
    assert value.__module__.startswith("accelerate_megatron.")
    assert name in dir(accelerate_megatron)


def test_accelerates_names_for_training_are_public():
    assert {
        "AbstractTrainStep",
        "Accelerator",
        "BertTrainStep",
        "GPTTrainStep",
        "MegatronLMDummyScheduler",
        "MegatronLMPlugin",
        "avg_losses_across_data_parallel_group",
    } <= set(PUBLIC)


def test_an_unknown_name_is_refused_with_the_public_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'ViTTrainStep'; .*GPTTrainStep"):
        _ = accelerate_megatron.ViTTrainStep


def test_import_brings_neither_megatron_nor_cuda():
    code = (
        "import sys, accelerate_megatron\n"
        "accelerate_megatron.Accelerator\n"
        "assert 'megatron.core' not in sys.modules\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )

    run_python(code)


def test_the_version_is_the_installed_one():
    assert metadata.version("accelerate-megatron") == accelerate_megatron.__version__


def test_each_imported_package_is_declared_and_each_declared_one_is_needed():
    declared = {
        re.split(r"[^\w-]", text, maxsplit=1)[0]
        for text in metadata.requires("accelerate-megatron") or []
        if "extra ==" not in text
    }
    imported = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    imported -= set(sys.stdlib_module_names) | {"accelerate_megatron"}
    imported = {PACKAGE_OF.get(name, name) for name in imported}
    # The examples train a tokenizer and show a progress bar; nothing else of theirs is extra.
    assert declared == imported | {"tokenizers", "tqdm"}


def test_megatron_core_is_on_disk_as_pip_has_installed_it():
    assert run_python(CHANGED_FILES) == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_holds_every_module_the_type_marker_and_nothing_else(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]

    sources = {
        f"accelerate_megatron/{path.relative_to(SOURCES)}"
        for path in SOURCES.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert names == sources
    assert "accelerate_megatron/py.typed" in names
    assert len(licenses) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it fetches gigabytes
def test_the_wheel_in_a_clean_environment_trains_the_example(tmp_path):
    """Build sdist and wheel, install the wheel alone, and run what README.md shows.

    A bare `Accelerator()` under a configuration file of Accelerate's runs there too.
    """
    python = tmp_path / "venv" / "bin" / "python"
    outside = {name: word for name, word in os.environ.items() if name != "PYTHONPATH"}

    def run(*words, folder=tmp_path):
        done = subprocess.run(
            [python, *words], cwd=folder, env=outside, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    run("-m", "pip", "install", "--quiet", "hatchling")
    run("-m", "hatchling", "build", "-d", tmp_path / "dist", folder=ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    run("-m", "pip", "install", "--quiet", wheel, torch)

    assert "No broken requirements" in run("-m", "pip", "check")
    (example,) = [block for block in blocks_of(ROOT / "README.md") if block.language == "diff"]
    (tmp_path / "train.py").write_text(SETUPS[example.what] + example.python())
    launch = ["-m", "accelerate_megatron", "launch", "--cpu", "--num_processes", "2"]
    run(*launch, "--tp_degree", "2", "train.py")
    (tmp_path / "bare.py").write_text(BARE_SCRIPT)
    (tmp_path / "bare.yaml").write_text(BARE_CONFIG)
    bare = ["launch", "--config_file", "bare.yaml", "--drop-in", "bare.py"]
    assert "DistributedType.MEGATRON_LM" in run("-m", "accelerate_megatron", *bare).splitlines()
    assert run("-c", CHANGED_FILES) == "", "megatron-core was changed on disk"
    home = run("-c", "import accelerate_megatron as package; print(package.__file__)").strip()
    assert Path(home).is_relative_to(tmp_path / "venv")
    assert (Path(home).parent / "py.typed").is_file()
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/accelerate_megatron/py.typed"} <= packed
