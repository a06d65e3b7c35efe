"""From the launcher's flags and the machine to what is started. Values in, values out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from accelerate_megatron.cli.command_line import UsageError
from accelerate_megatron.cli.machine import Machine
from accelerate_megatron.config.nearest import nearest_multiples
from accelerate_megatron.config.plugin_fields import FIELD, parse_bool

# The axes whose product the number of ranks must be a multiple of.
_MODEL_AXES = ("tp_degree", "pp_degree", "context_parallel_size")

# Tensors of more than 32 MB (at most) are mappings of their own to glibc, which the kernel zeroes
# page by page each time. With these (mallopt(3)) it keeps what is freed for the next tensor.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
_OTHER_ALLOCATORS = ("GLIBC_TUNABLES", "LD_PRELOAD")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What the command line asks for."""

    script: str
    script_args: tuple[str, ...]
    is_module: bool
    num_processes: int | None = None
    cpu: bool = False
    mixed_precision: str | None = None
    threads: int | None
    allocator: str = "keep"
    """"keep": on CPU, memory of freed tensors stays with the process; "default": as libc does."""
    max_restarts: int = 0
    num_machines: int = 1
    machine_rank: int = 0
    """Which of the machines this one is."""
    main_process_ip: str | None = None
    main_process_port: int = 0
    """0: a free one, on one machine."""
    drop_in: bool = False
    """Whether Accelerate's names mean this package's in the script."""
    plugin: Mapping[str, str]
    """MEGATRON_LM_* variables that flags and the configuration file set."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Other variables that the file sets."""
    notes: tuple[str, ...] = ()
    """What the user should know about the options themselves."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What is started: torchrun's arguments and the variables set for it."""

    num_processes: int
    """Ranks on this machine."""
    threads: int
    env: dict[str, str]
    torchrun_args: list[str]
    notes: list[str]
    """What the user should know, to be said once."""

    @property
    def command(self) -> list[str]:
        """The same as a command of its own."""
        return [sys.executable, "-m", "torch.distributed.run", *self.torchrun_args]


def plan_launch(options: LaunchOptions, machine: Machine, environ: Mapping[str, str]) -> LaunchPlan:
    """Decide ranks, threads, variables and command of a job.

    Raises:
        UsageError: The numbers do not fit each other or the machine.
        ConfigurationError: A variable of the environment has a value that cannot be read.
    """
    from_environment = parse_bool(environ.get("ACCELERATE_USE_CPU", "false"), "ACCELERATE_USE_CPU")
    use_cpu = options.cpu or from_environment or machine.cuda_devices == 0
    _check_machines(options)
    whole_job = _num_processes(options, machine, environ, use_cpu=use_cpu)
    num_processes = whole_job // options.num_machines
    threads = _threads(options, machine, environ, num_processes=num_processes)
    env = {
        **options.env,
        **options.plugin,
        # ACCELERATE_USE_MEGATRON_LM is not set: it makes Accelerate import its own
        # integration, which needs modules that megatron-core wheels lack.
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    if use_cpu:
        env["ACCELERATE_USE_CPU"] = "true"
        env |= _allocator(options, environ)
    if options.mixed_precision is not None:
        env["ACCELERATE_MIXED_PRECISION"] = options.mixed_precision
    return LaunchPlan(
        num_processes=num_processes,
        threads=threads,
        env=env,
        torchrun_args=_torchrun_args(options, num_processes),
        notes=[
            *options.notes,
            *_notes(options, machine, environ, num_processes=num_processes, threads=threads),
        ],
    )


def _num_processes(
    options: LaunchOptions, machine: Machine, environ: Mapping[str, str], *, use_cpu: bool
) -> int:
    degrees = {name: _degree(name, options, environ) for name in _MODEL_AXES}
    model_size = 1
    for degree in degrees.values():
        model_size *= degree
    asked = options.num_processes
    machines = options.num_machines
    devices = _cuda_devices(options, machine)
    if asked is None:
        asked = model_size if use_cpu else devices * machines
    if asked < 1 or asked % model_size:
        used = {name: degree for name, degree in degrees.items() if degree > 1}
        product = " x ".join(f"{name}={degree}" for name, degree in (used or degrees).items())
        raise UsageError(
            f"--num_processes {asked}: it must be a multiple of {product} = {model_size}, such as "
            f"{nearest_multiples(asked, model_size)}."
        )
    if asked % machines:
        raise UsageError(
            f"--num_processes {asked}: it counts the ranks of all {machines} machines, of which "
            f"each starts as many: it must be a multiple of {machines}."
        )
    if not use_cpu and asked // machines > devices:
        raise UsageError(
            f"--num_processes {asked}: this machine has {devices} CUDA device(s), and each rank "
            "needs one; ask for fewer ranks, or for --cpu."
        )
    return asked


def _cuda_devices(options: LaunchOptions, machine: Machine) -> int:
    """Return the devices that ranks will see: those of the file's `gpu_ids`, where it has any."""
    chosen = options.env.get("CUDA_VISIBLE_DEVICES")
    asked = machine.cuda_devices if chosen is None else len(chosen.split(","))
    return min(asked, machine.cuda_devices)


def _degree(name: str, options: LaunchOptions, environ: Mapping[str, str]) -> int:
    variable = FIELD[name].variable
    word = options.plugin.get(variable, environ.get(variable, "1"))
    degree: int = FIELD[name].parse(word, name)
    if degree < 1:
        raise UsageError(f"{name} is {degree}; it must be at least 1.")
    return degree


def _threads(
    options: LaunchOptions, machine: Machine, environ: Mapping[str, str], *, num_processes: int
) -> int:
    threads = options.threads
    if threads is None:
        threads = max(1, machine.cores // num_processes)
    if threads < 1:
        raise UsageError(f"--threads {threads}: a rank needs at least 1 thread.")
    limit = environ.get("OMP_THREAD_LIMIT")
    if limit is not None and limit.isdecimal() and int(limit) < threads:
        # Kernels that divide their work among the threads they asked for skip the parts of
        # those they do not get: results are wrong, not slow.
        raise UsageError(
            f"OMP_THREAD_LIMIT={limit} is lower than the {threads} threads of a rank, with which "
            f"torch computes wrong numbers; unset it, or pass --threads {limit}."
        )
    return threads


def _allocator(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of glibc's allocator; none where the user has made a choice."""
    has_chosen = any(name in environ for name in (*_KEEP_MEMORY, *_OTHER_ALLOCATORS))
    return {} if options.allocator == "default" or has_chosen else _KEEP_MEMORY


def _notes(
    options: LaunchOptions,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    num_processes: int,
    threads: int,
) -> list[str]:
    notes = []
    if num_processes * threads > machine.cores:
        notes.append(
            f"{num_processes} ranks x {threads} thread(s) on {machine.cores} core(s): they take "
            "turns, so expect the speed of the cores, not of the ranks."
        )
    found = environ.get("OMP_NUM_THREADS")
    if found not in (None, str(threads)) and options.threads is None:
        notes.append(
            f"each rank gets {threads} thread(s), cores / ranks; OMP_NUM_THREADS={found} of the "
            "environment is not used. --threads says otherwise."
        )
    return notes


def _check_machines(options: LaunchOptions) -> None:
    machines, rank = options.num_machines, options.machine_rank
    if machines < 1:
        raise UsageError(f"--num_machines {machines}: it must be at least 1.")
    if not 0 <= rank < machines:
        raise UsageError(
            f"--machine_rank {rank}: with --num_machines {machines} it is from 0 to {machines - 1}."
        )
    if machines == 1:
        return
    if options.main_process_ip is None:
        raise UsageError(
            f"--num_machines {machines} needs --main_process_ip: the address of machine 0, the "
            "same on all of them."
        )
    if not options.main_process_port:
        raise UsageError(
            f"--num_machines {machines} needs --main_process_port: a port that is free on machine "
            "0, the same on all of them. 0 picks one on a single machine only."
        )


def _torchrun_args(options: LaunchOptions, num_processes: int) -> list[str]:
    if options.max_restarts < 0:
        raise UsageError(f"--max_restarts {options.max_restarts}: it must be 0 or more.")
    restarts = [f"--max-restarts={options.max_restarts}"] if options.max_restarts else []
    target = [*(["--module"] if options.is_module else []), options.script]
    if options.drop_in:
        target = ["--module", "accelerate_megatron.cli.run_script", *target]
    return [
        f"--nproc-per-node={num_processes}",
        *_meeting(options),
        *restarts,
        *target,
        *options.script_args,
    ]


def _meeting(options: LaunchOptions) -> list[str]:
    if options.num_machines > 1:
        return [
            f"--nnodes={options.num_machines}",
            f"--node-rank={options.machine_rank}",
            f"--master-addr={options.main_process_ip}",
            f"--master-port={options.main_process_port}",
        ]
    if options.main_process_port:
        return ["--master-addr=127.0.0.1", f"--master-port={options.main_process_port}"]
    # The address is given because torchrun would otherwise ask the resolver for this
    # machine's name, which containers often cannot answer.
    return ["--local-addr=127.0.0.1", "--standalone"]
