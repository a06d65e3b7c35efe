"""Accelerate's configuration files, several machines, and which source wins."""

from __future__ import annotations

import pytest

from accelerate_megatron.cli import launch
from accelerate_megatron.cli.machine import Machine
from tests.cli.test_launch import planned, refused

OLD_FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MEGATRON_LM
downcast_bf16: 'no'
fsdp_config: {}
gpu_ids: null
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
megatron_lm_config:
  megatron_lm_gradient_clipping: 0.5
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: false
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""


@pytest.fixture(autouse=True)
def on_a_machine_without_variables(monkeypatch):
    machine = Machine(cores=16, cuda_devices=0)
    monkeypatch.setattr(launch.Machine, "find", classmethod(lambda cls: machine))
    for name in ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_an_old_file_of_accelerates_says_ranks_fields_and_precision(capsys, script, config):
    plan = planned(capsys, "--config_file", config(OLD_FILE), script)

    assert plan["num_processes"] == 8
    assert plan["env"]["MEGATRON_LM_TP_DEGREE"] == "2"
    assert plan["env"]["MEGATRON_LM_GRADIENT_CLIPPING"] == "0.5"
    assert plan["env"]["MEGATRON_LM_SEQUENCE_PARALLELISM"] == "True"
    assert plan["env"]["MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER"] == "False"
    assert plan["env"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert plan["notes"] == []


def test_flag_wins_over_file_wins_over_environment_and_one_line_says_so(
    capsys,
    script,
    config,
    monkeypatch,
):
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    words = ("--config_file", config(OLD_FILE), "--tp_degree", "1", "--num_processes", "4")

    plan = planned(capsys, *words, script)

    assert plan["env"]["MEGATRON_LM_TP_DEGREE"] == "1"
    assert plan["env"]["MEGATRON_LM_PP_DEGREE"] == "2"
    [note] = [note for note in plan["notes"] if "sources disagree" in note]
    assert "num_processes=4 (flag) over 8 (config.yaml)" in note
    assert "MEGATRON_LM_TP_DEGREE=1 (flag) over 2 (config.yaml)" in note
    assert "MEGATRON_LM_PP_DEGREE=2 (config.yaml) over 4 (environment)" in note
    assert "mixed_precision=bf16 (config.yaml) over fp16 (environment)" in note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_procesess: 2", "unknown key 'num_procesess'; did you mean num_processes"),
        (
            "megatron_lm_config: {megatron_lm_tp_degre: 2}",
            "unknown key 'megatron_lm_tp_degre'; did you mean megatron_lm_tp_degree",
        ),
        ("distributed_type: FSDP", "distributed_type 'FSDP'; this launcher starts"),
        ("deepspeed_config: {zero_stage: 3}", "deepspeed_config: .* cannot be combined"),
        ("num_processes: many", "num_processes: 'many'; it must be a number"),
        (
            "megatron_lm_config: {megatron_lm_sequence_parallelism: perhaps}",
            "'perhaps'; it must be one of true",
        ),
        ("[1, 2]", "must hold keys and values"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(capsys, script, config, text, message):
    import re

    said = refused(capsys, "--config_file", config(text), script)

    assert re.search(message, said.replace("\n", " "))


def test_a_missing_file_is_named(capsys, script):
    assert "nowhere.yaml cannot be read" in refused(capsys, "--config_file", "nowhere.yaml", script)


def test_an_unquoted_no_is_the_word(capsys, script, config):
    plan = planned(
        capsys,
        "--config_file",
        config("mixed_precision: no\ndistributed_type: NO\ngpu_ids: '0,1'\nuse_cpu: true"),
        script,
    )

    assert plan["env"]["ACCELERATE_MIXED_PRECISION"] == "no"
    assert plan["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert plan["env"]["ACCELERATE_USE_CPU"] == "true"


MACHINES = ("--num_machines", "2", "--num_processes", "8", "--tp_degree", "2")


def test_each_machine_starts_its_part_of_the_job(capsys, script):
    where = ("--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "2950")

    plan = planned(capsys, *MACHINES, *where, script)

    assert plan["num_processes"] == 4
    assert plan["threads"] == 4
    for word in ("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=2950"):
        assert word in plan["command"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (MACHINES, "needs --main_process_ip"),
        ((*MACHINES, "--main_process_ip", "10.0.0.1"), "needs --main_process_port"),
        ((*MACHINES, "--machine_rank", "2"), "is from 0 to 1"),
        (("--num_machines", "0"), "at least 1"),
        (
            (
                *("--num_machines", "2", "--num_processes", "3"),
                *("--main_process_ip", "10.0.0.1", "--main_process_port", "2950"),
            ),
            "it must be a multiple of 2",
        ),
    ],
)
def test_machines_that_do_not_fit_are_refused(capsys, script, words, message):
    assert message in refused(capsys, *words, script).replace("\n", " ")


def test_the_drop_in_runs_the_script_in_its_own_runner(capsys, script):
    plan = planned(capsys, "--drop-in", script, "--lr", "3")

    assert plan["command"][-5:] == [
        "--module",
        "accelerate_megatron.cli.run_script",
        script,
        "--lr",
        "3",
    ]
