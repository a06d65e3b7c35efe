"""`accelerate-megatron env`: what is installed, and whether it can be used."""

from __future__ import annotations

import json

import torch

import accelerate_megatron
from accelerate_megatron.cli import engine_support as engine_support_module
from accelerate_megatron.cli.engine_support import engine_support
from accelerate_megatron.cli.machine import count_cores
from accelerate_megatron.cli.main import main


def facts(capsys):
    assert main(["env", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_versions_are_those_installed(capsys):
    found = facts(capsys)

    assert found["accelerate-megatron"] == accelerate_megatron.__version__
    assert torch.__version__.startswith(found["torch"])
    assert found["megatron-core"]["usable"] is True
    assert found["megatron-core"]["supported"] == ">=0.16.1,<0.20"


def test_cores_threads_and_devices_are_this_machines(capsys):
    found = facts(capsys)

    assert found["cores"] == count_cores()
    assert found["threads of torch"] == torch.get_num_threads()
    assert found["cuda"]["torch built for"] == torch.version.cuda
    assert found["cuda"]["devices"] == (
        torch.cuda.device_count() if torch.cuda.is_available() else 0
    )


def test_what_is_optional_is_said_to_be_there_or_not(capsys):
    assert set(facts(capsys)["optional"]) == {"transformer_engine", "apex", "triton"}


def test_variables_that_decide_about_threads_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("OMP_THREAD_LIMIT", "64")

    assert facts(capsys)["environment"]["OMP_THREAD_LIMIT"] == "64"


def test_the_text_has_a_line_for_each_fact(capsys):
    found = facts(capsys)
    assert main(["env"]) == 0

    lines = capsys.readouterr().out.splitlines()

    assert [line[:20].rstrip() for line in lines if line[0] != " "] == list(found)
    assert sum(line[0] == " " for line in lines) == len(found["engine support"])


def test_what_the_engine_can_do_here_is_said_with_how_to_get_the_rest(capsys):
    found = facts(capsys)
    support = {row["what"]: row for row in found["engine support"]}

    assert support["training on CPU ranks, over gloo"]["here"] is True
    assert support["training on CUDA, over NCCL"]["here"] is (found["cuda"]["devices"] > 0)
    for row in support.values():
        assert bool(row["how"]) is not row["here"], row


def test_without_megatron_core_nothing_runs_and_the_cure_is_named():
    rows = engine_support({"usable": False, "problem": "pip install megatron-core"}, 8)

    assert not any(row["here"] for row in rows if "tensorboard" not in row["what"])
    assert all("pip install megatron-core" in row["how"] for row in rows[:7])


def test_transformer_engine_is_what_the_precision_aware_optimizer_wants_on_cuda(monkeypatch):
    usable = {"usable": True}
    row = engine_support(usable, 1)[6]
    assert "transformer-engine" in row["how"]

    monkeypatch.setattr(engine_support_module.importlib.util, "find_spec", lambda name: object())

    assert engine_support(usable, 1)[6]["here"] is True
    assert engine_support(usable, 0)[6]["here"] is False


def test_an_unknown_megatron_core_is_named_with_the_supported_range(capsys, monkeypatch, tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 0\n")
    monkeypatch.setattr("accelerate_megatron.engine.versions.core_folder", lambda: core)

    assert main(["env"]) == 1

    text = capsys.readouterr().out
    assert "Megatron-Core 0.99.0" in text
    assert ">=0.16.1,<0.20" in text


def test_retarget_shows_each_rewritten_place_by_module_and_each_patch(capsys):
    places, counted, patches = retarget_text(capsys)

    assert places[0].startswith("megatron.core.")
    assert any("torch.cuda" in line and "[torch-cuda]" in line for line in places)
    num_places = sum(line.startswith("  ") for line in places)
    assert counted[0].startswith(f"{num_places} places in {len(places) - num_places} modules")
    assert any("megatron.core.optimizer.Adam" in line for line in patches)


def test_retarget_as_json_names_file_line_and_rule(capsys):
    assert main(["env", "--retarget", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)

    place = found["rewrites"][0]
    with open(place["path"], encoding="utf-8") as file:
        line = file.read().splitlines()[place["line"] - 1]
    assert place["before"].splitlines()[0] in line
    assert {"symbol", "why", "is_applied"} <= set(found["patches"][0])


def retarget_text(capsys):
    """Return the three parts of the text: places, rules, patches."""
    assert main(["env", "--retarget"]) == 0
    parts = capsys.readouterr().out.strip().split("\n\n")
    return [part.splitlines() for part in parts]
