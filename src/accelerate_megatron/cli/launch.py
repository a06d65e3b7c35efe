"""`accelerate-megatron launch SCRIPT`: starts the ranks of a job on this machine, or its part.

Flags become environment variables (`launch_plan`), then torchrun starts the script. Torch is
imported last: its thread pools read the environment when they are made.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate_megatron.cli.command_line import CommandLine, UsageError, split_command_line
from accelerate_megatron.cli.launch_config import (
    JOB_KEYS,
    ConfigFile,
    merged,
    precedence_note,
    read_config_file,
)
from accelerate_megatron.cli.launch_plan import LaunchOptions, LaunchPlan, plan_launch
from accelerate_megatron.cli.machine import Machine
from accelerate_megatron.cli.plugin_flags import add_plugin_flags, plugin_variables
from accelerate_megatron.errors import ConfigurationError

_EXAMPLE = """
example: four ranks on CPU, the model split over two tensor- and two pipeline-parallel ranks
  accelerate-megatron launch --cpu --num_processes 4 --tp_degree 2 --pp_degree 2 train.py --lr 3e-4

Every flag may also be written with dashes (--tp-degree) and, for the fields of MegatronLMPlugin,
with Accelerate's prefix (--megatron_lm_tp_degree). In parentheses: what holds without the flag.
A field that the script sets on its MegatronLMPlugin wins over the flag.
"""


def main(argv: Sequence[str]) -> int:
    """Start a script on N ranks and return the exit status of the job.

    Args:
        argv: The words after `launch`.
    """
    parser, takes_value = make_parser()
    try:
        command_line = split_command_line(argv, takes_value=takes_value)
        args = parser.parse_args(command_line.own)
        _check_script(command_line, is_module=args.module)
        file = read_config_file(args.config_file) if args.config_file else ConfigFile()
        options = _options(args, command_line, file)
        _check_port(options)
        plan = plan_launch(options, Machine.find(), {**os.environ, **file.env})
    except (UsageError, ConfigurationError) as error:
        parser.error(str(error))
    if args.dry_run:
        print(_describe(plan, as_json=args.json))
        return 0
    for note in plan.notes:
        print(f"accelerate-megatron: {note}", file=sys.stderr)
    return _run(plan)


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, bool]]:
    """Return the parser of the launcher's own flags, and which spellings take a value."""
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron launch",
        usage="accelerate-megatron launch [flags] SCRIPT [arguments of the script]",
        description="Start a script on N ranks of this machine, with Megatron-Core underneath.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = [*_add_job_flags(parser.add_argument_group("the job")), *add_plugin_flags(parser)]
    takes_value = {
        spelling: action.nargs != 0 for action in actions for spelling in action.option_strings
    }
    return parser, {"-h": False, "--help": False, **takes_value}


def _add_job_flags(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    def add(name: str, help_text: str, **settings: object) -> list[argparse.Action]:
        shown = group.add_argument(f"--{name}", help=help_text, **settings)  # type: ignore[arg-type]
        if "_" not in name:
            return [shown]
        dashed = f"--{name.replace('_', '-')}"
        return [
            shown,
            group.add_argument(dashed, dest=name, help=argparse.SUPPRESS, **settings),  # type: ignore[arg-type]
        ]

    actions = add(
        "config_file",
        "a file that accelerate config wrote; flags come before it, it before the environment",
        metavar="YAML",
    )
    actions += add(
        "num_processes",
        "ranks of the job, on all machines (the CUDA devices; on CPU tp_degree x pp_degree x "
        "context_parallel_size)",
        type=int,
        metavar="N",
    )
    actions += add("num_machines", "machines of the job (1)", type=int, metavar="N")
    actions += add("machine_rank", "which of them this one is, from 0", type=int, metavar="N")
    actions += add("main_process_ip", "address of machine 0", metavar="IP")
    actions += add("cpu", "run on CPU; so it is anyway without a CUDA device", action="store_true")
    actions += add(
        "mixed_precision",
        "no, bf16 or fp16 (the script's own)",
        choices=["no", "bf16", "fp16"],
        metavar="P",
    )
    actions += add("threads", "threads per rank (cores / ranks, at least 1)", type=int, metavar="N")
    actions += add(
        "allocator",
        "on CPU, keep: memory of freed tensors is kept for the next ones, which is faster; "
        "default: as the C library does, so also where the environment names an allocator (keep)",
        choices=["keep", "default"],
        metavar="A",
    )
    actions += add(
        "main_process_port",
        "port the ranks meet at; 0 picks a free one, on one machine (0)",
        type=int,
        metavar="PORT",
    )
    actions += add(
        "max_restarts",
        "start all ranks again up to N times when one fails; the script goes on from its last "
        'checkpoint with load_state("auto") (0)',
        type=int,
        metavar="N",
    )
    actions += add(
        "drop_in",
        "let Accelerate's own names mean this package's: runs a script written for Accelerate",
        action="store_true",
    )
    actions += add("module", "SCRIPT is a module's name, as for python -m", action="store_true")
    actions += add("dry_run", "print what would be started, and stop", action="store_true")
    actions += add("json", "print it as JSON", action="store_true")
    return actions


def _options(
    args: argparse.Namespace, command_line: CommandLine, file: ConfigFile
) -> LaunchOptions:
    assert command_line.script is not None, "_check_script comes first"
    flags = {name: getattr(args, name) for name in JOB_KEYS if getattr(args, name) is not None}
    if args.cpu:
        flags["cpu"] = True
    known = {"mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION")}
    from_environment = {name: word for name, word in known.items() if word is not None}
    job, overruled = merged(flags, file.job, from_environment, file.name)
    plugin, also = merged(plugin_variables(args), file.plugin, os.environ, file.name)
    return LaunchOptions(
        script=command_line.script,
        script_args=tuple(command_line.script_args),
        is_module=args.module,
        drop_in=args.drop_in,
        threads=args.threads,
        allocator=args.allocator or "keep",
        plugin=plugin,
        env=file.env,
        notes=tuple(precedence_note(overruled + also)),
        **job,
    )


def _check_script(command_line: CommandLine, *, is_module: bool) -> None:
    script = command_line.script
    if script is None:
        raise UsageError("no script given; it comes after the flags (see --help for an example).")
    if not is_module and not Path(script).is_file():
        raise UsageError(f"{script}: no such file; a module's name needs --module before it.")


def _check_port(options: LaunchOptions) -> None:
    """Refuse a port that is taken, which the ranks would otherwise find out one by one."""
    port = options.main_process_port
    if not 0 <= port < 65536:
        raise UsageError(f"--main_process_port {port}: a port is between 1 and 65535, or 0.")
    if port == 0 or options.machine_rank > 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(
                f"--main_process_port {port} cannot be used ({error.strerror}); 0 picks a free one."
            ) from None


def _describe(plan: LaunchPlan, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(
            {
                "num_processes": plan.num_processes,
                "threads": plan.threads,
                "env": plan.env,
                "command": plan.command,
                "notes": plan.notes,
            },
            indent=2,
        )
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(plan.env.items())]
    notes = [f"# {note}" for note in plan.notes]
    return "\n".join([*notes, *(f"{line} \\" for line in lines), shlex.join(plan.command)])


def _run(plan: LaunchPlan) -> int:
    """Run torchrun in this process and return the exit status of the first rank that failed."""
    os.environ.update(plan.env)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from accelerate_megatron.cli.job_failure import JobFailedError

    try:
        run.main(plan.torchrun_args)
    except ChildFailedError as error:
        failed = JobFailedError(error)
        print(failed, file=sys.stderr)
        _, failure = failed.get_first_failure()
        return _shell_status(failure.exitcode)
    except SignalException as error:
        return 128 + error.sigval.value
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _shell_status(exit_code: int) -> int:
    """Return a rank's exit code as a shell shows it: 128 + n when signal n ended it."""
    return exit_code if exit_code >= 0 else 128 - exit_code
