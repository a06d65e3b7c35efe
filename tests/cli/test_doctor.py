"""`doctor` says what is wrong with a machine, what mends it, and fails when something is."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_megatron.cli import doctor
from accelerate_megatron.cli.main import main

ALONE = {
    "device": "cpu",
    "threads": 1,
    "training step": {"problem": "", "loss": 4.8, "grad_norm": 1.5},
}
RANK = {
    **ALONE,
    "collectives": {"problem": "", "found": "all_reduce over gloo"},
    "checkpoint": {"problem": "", "found": "saved and loaded"},
}
FACTS: dict[str, Any] = {
    "megatron-core": {"version": "0.16.1", "usable": True},
    "cuda": {"torch built for": None, "devices": 0},
    "cores": 4,
    **dict.fromkeys(
        ("torch", "accelerate", "transformers", "tokenizers", "safetensors", "numpy"), "1.0"
    ),
}


def reports(*changes: tuple[int, str, Any]) -> list[dict[str, Any]]:
    """Return what two ranks write down, with changes (rank, name, value); None takes it out."""
    pair = [copy.deepcopy(RANK), copy.deepcopy(RANK)]
    for rank, name, value in changes:
        if value is None:
            del pair[rank][name]
        else:
            pair[rank][name] = value
    return pair


def wrong(checks: list[doctor.Check]) -> list[doctor.Check]:
    assert all(bool(check.cure) != check.ok for check in checks)
    return [check for check in checks if not check.ok]


def test_nothing_wrong_is_nothing_wrong() -> None:
    checks = doctor.judge([ALONE], reports())

    assert [check.name for check in checks] == [
        "ranks",
        "collectives",
        "training step",
        "checkpoint",
    ]
    assert wrong(checks) == []


@pytest.mark.parametrize(
    ("change", "name", "found"),
    [
        pytest.param((1, "device", None), "ranks", "rank 1 of two did not start", id="start"),
        pytest.param(
            (0, "collectives", {"problem": "all_reduce gave 1 instead of 3"}),
            "collectives",
            "rank 0: all_reduce gave 1 instead of 3",
            id="collective",
        ),
        pytest.param(
            (1, "checkpoint", None), "checkpoint", "rank 1: it did not get there", id="silent"
        ),
        pytest.param(
            (1, "training step", {"problem": "", "loss": 4.8, "grad_norm": 1.6}),
            "training step",
            "gradient norm 1.500000 at TP1 and 1.600000 at TP2",
            id="norm",
        ),
        pytest.param(
            (1, "training step", {"problem": "", "loss": float("nan"), "grad_norm": 1.5}),
            "training step",
            "loss 4.800000 at TP1 and nan at TP2",
            id="nan",
        ),
        pytest.param(
            (0, "training step", {"problem": "RuntimeError: no"}),
            "training step",
            "TP2, rank 0: RuntimeError: no",
            id="raised",
        ),
    ],
)
def test_what_a_rank_finds_is_told_with_its_cure(change: Any, name: str, found: str) -> None:
    (check,) = wrong(doctor.judge([ALONE], reports(change)))

    assert check.name == name
    assert found in check.found


def test_a_single_rank_that_did_not_start_is_told() -> None:
    (check,) = wrong(doctor.judge([{}], reports()))

    assert check.found == "a single rank did not start"


@pytest.mark.parametrize(
    ("changes", "environ", "name", "cure"),
    [
        pytest.param(
            {"megatron-core": {"version": None, "usable": False, "problem": "Install it."}},
            {},
            "versions",
            "Install it.",
            id="engine",
        ),
        pytest.param({"numpy": None}, {}, "versions", "pip install numpy", id="package"),
        pytest.param(
            {}, {"OMP_THREAD_LIMIT": "1"}, "threads", "unset OMP_THREAD_LIMIT", id="threads"
        ),
    ],
)
def test_a_machine_that_is_not_in_order_is_told(
    tmp_path: Path, changes: Any, environ: Any, name: str, cure: str
) -> None:
    (check,) = wrong(doctor.check_machine({**FACTS, **changes}, tmp_path, environ))

    assert check.name == name
    assert cure in check.cure


@pytest.mark.parametrize(
    ("built_for", "count", "found"),
    [
        (None, 0, "the CPU only: this torch is built without CUDA"),
        ("12.8", 0, "the CPU only: torch, built for CUDA 12.8, sees no GPU"),
        ("12.8", 2, "2 CUDA device(s)"),
    ],
)
def test_what_torch_can_train_on_is_told(
    tmp_path: Path, built_for: str | None, count: int, found: str
) -> None:
    facts = {**FACTS, "cuda": {"torch built for": built_for, "devices": count}}

    checks = {check.name: check for check in doctor.check_machine(facts, tmp_path, {})}

    assert checks["devices"] == doctor.Check("devices", True, found)


def test_too_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FREE_BYTES", 10**18)

    (check,) = wrong(doctor.check_machine(FACTS, tmp_path, {}))

    assert "--folder" in check.cure
    assert str(tmp_path) in check.found


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("is_ok", [True, False])
def test_status_and_text_say_whether_all_is_in_order(
    is_ok: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    last = doctor.Check("checkpoint", is_ok, "found", "" if is_ok else "mend it")
    monkeypatch.setattr(doctor, "check_machine", lambda *_: [doctor.Check("disk", True, "much")])
    monkeypatch.setattr(doctor, "_check_ranks", lambda *_, **__: [last])

    status = main(["doctor", *(["--json"] if as_json else [])])

    assert status == (0 if is_ok else 1)
    text = capsys.readouterr().out
    assert ("mend it" in text) == (not is_ok)
    if as_json:
        found = json.loads(text)
        assert found["ok"] == is_ok
        assert [check["name"] for check in found["checks"]] == ["disk", "checkpoint"]
    else:
        assert ("all is in order" if is_ok else "1 of 2 checks failed") in text


def test_no_rank_is_started_on_a_machine_that_is_not_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    bad = doctor.Check("disk", False, "full", "make room")
    monkeypatch.setattr(doctor, "check_machine", lambda *_: [bad])
    monkeypatch.setattr(doctor, "_check_ranks", lambda *_, **__: pytest.fail("ranks started"))

    assert main(["doctor"]) == 1
    assert "make room" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--folder", "/no/such/folder"])

    assert stopped.value.code == 2
    assert "no such folder" in capsys.readouterr().err


def run_doctor(folder: Path, **environ: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command itself; return its status and its checks."""
    words = ["doctor", "--cpu", "--json", "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_megatron", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    return done.returncode, json.loads(done.stdout)["checks"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_checks_this_machine_and_leaves_nothing(tmp_path: Path) -> None:
    status, checks = run_doctor(tmp_path)

    assert (status, [check for check in checks if not check["ok"]]) == (0, [])
    assert [check["name"] for check in checks] == [
        "versions",
        "devices",
        "threads",
        "disk",
        "ranks",
        "collectives",
        "training step",
        "checkpoint",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_network_device_that_is_not_there_is_found(tmp_path: Path) -> None:
    status, checks = run_doctor(tmp_path, GLOO_SOCKET_IFNAME="nothere0")

    assert status == 1
    assert [check["name"] for check in checks if not check["ok"]] == ["ranks"]
