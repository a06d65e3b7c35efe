"""`accelerate-megatron launch`: flags, ranks, threads, variables, and the status of the job."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import accelerate
import pytest

from accelerate_megatron.cli import launch
from accelerate_megatron.cli.machine import Machine
from accelerate_megatron.cli.main import main
from tests.helpers.ports import held_port

CPU_MACHINE = Machine(cores=8, cuda_devices=0)
GPU_MACHINE = Machine(cores=32, cuda_devices=4)
ALLOCATOR = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}

OBJECTS = {
    "no_wd_decay_cond",
    "scale_lr_cond",
    "custom_train_step_class",
    "custom_train_step_kwargs",
    "custom_model_provider_function",
    "custom_prepare_model_function",
    "custom_megatron_datasets_provider_function",
    "custom_get_batch_function",
    "custom_loss_function",
    "other_megatron_args",
}


@pytest.fixture(autouse=True)
def on_a_machine_of_8_cores(monkeypatch):
    set_machine(monkeypatch, CPU_MACHINE)
    threads = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")
    for variable in (*threads, *ALLOCATOR, "GLIBC_TUNABLES", "LD_PRELOAD", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def set_machine(monkeypatch, machine):
    monkeypatch.setattr(launch.Machine, "find", classmethod(lambda cls: machine))


def planned(capsys, *words):
    """Return what a dry run says it would start."""
    assert main(["launch", "--dry-run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    """Return the message of a refused command line."""
    with pytest.raises(SystemExit) as stopped:
        main(["launch", "--dry-run", *words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["--tp_degree", "--tp-degree", "--megatron_lm_tp_degree"])
def test_a_plugin_field_has_three_spellings(capsys, script, spelling):
    for words in ([spelling, "2"], [f"{spelling}=2"]):
        plan = planned(capsys, *words, script)

        assert plan["env"]["MEGATRON_LM_TP_DEGREE"] == "2"
        assert plan["num_processes"] == 2


def test_every_field_of_the_plugin_is_a_flag_but_python_objects(capsys, script):
    fields = {field.name for field in dataclasses.fields(accelerate.utils.MegatronLMPlugin)}
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    text = capsys.readouterr().out

    missing = {name for name in fields if f"--{name} " not in text}

    assert missing == OBJECTS


def test_flags_that_are_not_given_set_no_variable(capsys, script):
    plan = planned(capsys, script)

    assert not [name for name in plan["env"] if name.startswith("MEGATRON_LM_")]
    assert "ACCELERATE_MIXED_PRECISION" not in plan["env"]


def test_the_job_is_never_marked_as_accelerates_own(capsys, script):
    env = planned(capsys, "--mixed_precision", "bf16", script)["env"]

    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "ACCELERATE_USE_MEGATRON_LM" not in env


@pytest.mark.parametrize("word", ["true", "YES", "off", "0"])
def test_a_boolean_flag_takes_true_and_false_words(capsys, script, word):
    plan = planned(capsys, "--tp_degree=2", "--sequence_parallelism", word, script)

    assert plan["env"]["MEGATRON_LM_SEQUENCE_PARALLELISM"] == word


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sequence_parallelism=maybe", "true, 1, yes, on or one of false, 0, no, off"),
        ("--tp_degree=two", "--tp_degree is 'two'; it must be a whole number"),
        ("--gradient_clipping=much", "--gradient_clipping is 'much'; it must be a number"),
        ("--lr_decay_style=sudden", "it must be one of constant, linear, cosine"),
        ("--tp_degree=0", "tp_degree is 0; it must be at least 1"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(capsys, script, flag, message):
    assert message in refused(capsys, flag, script)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--tp_degre", "--tp_degree"),
        ("--megatron-lm-tp-degree", "--tp_degree"),
        ("--nproc_processes", "--num_processes"),
        ("--sequence-parallel", "--sequence_parallelism"),
    ],
)
def test_an_unknown_flag_before_the_script_gets_the_nearest_names(capsys, script, flag, meant):
    message = refused(capsys, flag, "2", script)

    assert f"{flag}: no such flag; did you mean" in message
    assert meant in message


def test_a_flag_like_no_other_is_pointed_to_help_and_to_the_scripts_place(capsys, script):
    message = refused(capsys, "--xyzzy", script)

    assert "--help lists the flags" in message
    assert "The script's own arguments come after the script." in message


def test_words_after_the_script_are_the_scripts_own(capsys, script):
    plan = planned(capsys, "--cpu", script, "--tp_degree", "7", "--lr", "1e-3")

    assert plan["command"][-5:] == [script, "--tp_degree", "7", "--lr", "1e-3"]
    assert "MEGATRON_LM_TP_DEGREE" not in plan["env"]


def test_a_missing_script_is_refused(capsys):
    assert "no script given" in refused(capsys, "--cpu")
    assert "nowhere.py: no such file" in refused(capsys, "nowhere.py")


def test_a_module_is_started_as_python_dash_m_does(capsys):
    plan = planned(capsys, "--module", "my.training", "--lr", "1")

    assert plan["command"][-4:] == ["--module", "my.training", "--lr", "1"]


def test_on_cpu_there_are_as_many_ranks_as_the_model_takes(capsys, script):
    plan = planned(capsys, "--tp_degree=2", "--pp_degree=2", script)

    assert plan["num_processes"] == 4
    assert plan["env"]["ACCELERATE_USE_CPU"] == "true"


def test_degrees_of_the_environment_count_too(capsys, script, monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "4")

    assert planned(capsys, script)["num_processes"] == 4


def test_on_cuda_there_is_a_rank_for_each_device(capsys, script, monkeypatch):
    set_machine(monkeypatch, GPU_MACHINE)

    plan = planned(capsys, "--tp_degree=2", script)

    assert plan["num_processes"] == 4
    assert "ACCELERATE_USE_CPU" not in plan["env"]


def test_cpu_can_be_asked_for_where_there_is_cuda(capsys, script, monkeypatch):
    set_machine(monkeypatch, GPU_MACHINE)
    assert planned(capsys, "--cpu", script)["env"]["ACCELERATE_USE_CPU"] == "true"

    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")

    assert planned(capsys, script)["num_processes"] == 1


def test_more_ranks_than_cuda_devices_are_refused(capsys, script, monkeypatch):
    set_machine(monkeypatch, GPU_MACHINE)

    message = refused(capsys, "--num_processes=8", script)

    assert "--num_processes 8: this machine has 4 CUDA device(s)" in message


def test_a_rank_for_each_device_that_the_file_names(capsys, script, monkeypatch, tmp_path):
    set_machine(monkeypatch, GPU_MACHINE)
    file = tmp_path / "config.yaml"
    file.write_text("gpu_ids: 1,3")

    assert planned(capsys, "--config_file", str(file), script)["num_processes"] == 2
    message = refused(capsys, "--config_file", str(file), "--num_processes=4", script)
    assert "--num_processes 4: this machine has 2 CUDA device(s)" in message


def test_ranks_that_the_degrees_do_not_divide_are_refused_with_numbers_that_work(capsys, script):
    message = refused(capsys, "--num_processes=6", "--tp_degree=2", "--pp_degree=2", script)

    assert "multiple of tp_degree=2 x pp_degree=2 = 4, such as 4 or 8." in message


@pytest.mark.parametrize(("ranks", "threads"), [(1, 8), (3, 2), (8, 1), (16, 1)])
def test_threads_of_a_rank_are_cores_over_ranks_and_at_least_one(capsys, script, ranks, threads):
    plan = planned(capsys, f"--num_processes={ranks}", script)

    assert plan["env"]["OMP_NUM_THREADS"] == str(threads)
    assert plan["env"]["MKL_NUM_THREADS"] == str(threads)


def test_threads_can_be_given(capsys, script):
    assert planned(capsys, "--threads=3", script)["env"]["OMP_NUM_THREADS"] == "3"
    assert "a rank needs at least 1 thread" in refused(capsys, "--threads=0", script)


def test_more_threads_than_cores_are_reported(capsys, script):
    assert planned(capsys, "--num_processes=8", script)["notes"] == []

    (note,) = planned(capsys, "--num_processes=16", script)["notes"]

    assert "16 ranks x 1 thread(s) on 8 core(s)" in note


def test_a_number_of_threads_in_the_environment_is_replaced_and_that_is_said(
    capsys, script, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    plan = planned(capsys, "--num_processes=8", script)

    assert plan["env"]["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS=2 of the environment is not used" in plan["notes"][0]


def test_a_thread_limit_below_the_threads_of_a_rank_is_refused(capsys, script, monkeypatch):
    monkeypatch.setenv("OMP_THREAD_LIMIT", "2")

    message = refused(capsys, "--num_processes=2", script)

    assert "OMP_THREAD_LIMIT=2 is lower than the 4 threads of a rank" in message
    assert planned(capsys, "--num_processes=4", script)["threads"] == 2


def test_a_port_in_use_is_refused_before_the_start(capsys, script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        message = refused(capsys, f"--main_process_port={port}", script)

    assert f"--main_process_port {port} cannot be used" in message
    assert "0 picks a free one" in message


def test_a_free_port_is_where_the_ranks_meet(capsys, script):
    with held_port() as port:
        plan = planned(capsys, f"--main_process_port={port}", script)

    assert f"--master-port={port}" in plan["command"]


def test_a_dry_run_prints_a_line_that_a_shell_runs(capsys, script):
    assert main(["launch", "--dry-run", "--tp-degree=2", script, "--name", "a b"]) == 0

    text = capsys.readouterr().out

    assert "MEGATRON_LM_TP_DEGREE=2 \\\n" in text
    assert text.endswith(f"{script} --name 'a b'\n")


def start(*words, **settings):
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate_megatron", "launch", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def test_ranks_start_with_their_variables_and_threads_and_the_jobs_status_is_0(tmp_path):
    script = tmp_path / "say.py"
    script.write_text(
        "import json, os, sys, torch\n"
        "names = ('RANK', 'WORLD_SIZE', 'MEGATRON_LM_TP_DEGREE')\n"
        "facts = [os.environ[name] for name in names]\n"
        "line = json.dumps([*facts, torch.get_num_threads(), sys.argv[1:]])\n"
        "os.write(1, f'{line}\\n'.encode())\n"  # in one piece: both ranks write to one pipe
    )

    job = start("--cpu", "--tp_degree=2", "--threads=1", str(script), "--lr", "1")
    out, err = job.communicate(timeout=250)

    assert job.returncode == 0, err
    ranks = sorted(json.loads(line) for line in out.splitlines())
    assert ranks == [[str(rank), "2", "2", 1, ["--lr", "1"]] for rank in (0, 1)]


def test_the_status_of_the_job_is_that_of_the_rank_that_failed(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")

    job = start("--cpu", "--num_processes=2", str(script))
    _, err = job.communicate(timeout=250)

    assert job.returncode == 7
    assert "rank      : 1" in err


def test_a_signal_ends_the_ranks_and_shows_in_the_status(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"path = pathlib.Path({str(tmp_path)!r}, os.environ['RANK'])\n"
        "unfinished = path.with_suffix('.unfinished')\n"
        "unfinished.write_text(str(os.getpid()))\n"
        "unfinished.rename(path)\n"  # whoever finds it finds the number in it
        "time.sleep(600)\n"
    )
    job = start("--cpu", "--num_processes=2", str(script))
    wait_for(lambda: all((tmp_path / rank).is_file() for rank in "01"))
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]

    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=100)

    assert job.returncode == 128 + signal.SIGTERM
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_for(is_so, seconds=150):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def test_the_launcher_reads_its_flags_without_torch():
    code = (
        "import sys, accelerate_megatron.cli.main as m\n"
        f"m.main(['launch', '--dry-run', '--tp_degree=2', {__file__!r}])\n"
        "assert not {'torch', 'accelerate', 'megatron'} & set(sys.modules)\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_on_cpu_freed_memory_is_kept_unless_the_user_says_otherwise(capsys, script, monkeypatch):
    assert set(planned(capsys, script)["env"]) >= ALLOCATOR
    assert not ALLOCATOR & set(planned(capsys, "--allocator=default", script)["env"])

    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so")
    assert not ALLOCATOR & set(planned(capsys, script)["env"])

    monkeypatch.delenv("LD_PRELOAD")
    set_machine(monkeypatch, GPU_MACHINE)
    assert not ALLOCATOR & set(planned(capsys, script)["env"])


@pytest.mark.parametrize(
    ("seen", "blamed"),
    [
        pytest.param([(1, 0), (1, 0), (-9, 0)], 2, id="killed, and two that missed it"),
        pytest.param([(1, 0), (75, 1)], 1, id="stuck"),
        pytest.param([(1, 1), (1, 0)], 1, id="the first of its kind"),
        pytest.param([(-6, 0), (-11, 0), (-15, 0)], 1, id="aborted by its backend"),
        pytest.param([(-9, 30), (1, 0)], 1, id="killed by the launcher in the end"),
    ],
)
def test_of_ranks_that_fail_at_once_the_one_that_others_can_only_have_followed_is_blamed(
    seen, blamed
):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from accelerate_megatron.cli.job_failure import JobFailedError

    failures = {}
    for rank, (exitcode, seconds) in enumerate(seen):
        failures[rank] = ProcessFailure(rank, 1000 + rank, exitcode, error_file="none")
        failures[rank].timestamp = 1_000_000 + seconds

    error = JobFailedError(ChildFailedError("job", failures))

    assert error.get_first_failure() == (blamed, failures[blamed])
    assert f"rank      : {blamed} " in str(error).split("Root Cause")[1]
