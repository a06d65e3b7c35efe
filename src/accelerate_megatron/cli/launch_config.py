"""Accelerate's configuration files, and which of flag, file and environment wins.

A file is what `accelerate config` writes, of today's form or an older one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate_megatron.cli.command_line import UsageError
from accelerate_megatron.config.plugin_fields import FIELD, parse_bool

JOB_KEYS = {
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "mixed_precision": str,
    "max_restarts": int,
}
"""Keys that say the same as the launcher's flags of their names."""

_WITHOUT_EFFECT = frozenset(
    {
        "compute_environment",
        "downcast_bf16",
        "main_training_function",
        "rdzv_backend",
        "same_network",
        "tpu_name",
        "tpu_zone",
        "tpu_env",
        "tpu_vm",
        "command_file",
        "commands",
    }
)
"""Keys that every file has and that concern other ways to launch: notebooks, TPU pods."""

_OTHER_STRATEGIES = (
    "deepspeed_config",
    "fsdp_config",
    "fp8_config",
    "parallelism_config",
    "mpirun_config",
    "dynamo_config",
    "dynamo_backend",
    "tpu_use_cluster",
    "tpu_use_sudo",
)
_DISTRIBUTED_TYPES = ("MEGATRON_LM", "NO", "MULTI_GPU", "MULTI_CPU")
_PREFIX = "megatron_lm_"
_KNOWN = (
    *JOB_KEYS,
    *sorted(_WITHOUT_EFFECT),
    *_OTHER_STRATEGIES,
    "distributed_type",
    "use_cpu",
    "gpu_ids",
    "debug",
    "enable_cpu_affinity",
    "megatron_lm_config",
)


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """What a file says, in the launcher's terms."""

    name: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)
    """By the name of the flag."""
    plugin: Mapping[str, str] = field(default_factory=dict)
    """MEGATRON_LM_* variables."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Other variables."""


def read_config_file(path: str) -> ConfigFile:
    """Return what an Accelerate configuration file says.

    Raises:
        UsageError: It cannot be read, has an unknown key, or asks for another strategy.
        ConfigurationError: A value is not of its field's kind.
    """
    import yaml  # Accelerate depends on it. It comes without types.

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config_file {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config_file {path}: it must hold keys and values.")
    _refuse_unknown(path, content, _KNOWN)
    _refuse_other_strategies(path, content)
    return ConfigFile(
        name=Path(path).name,
        job=_job(path, content),
        plugin=_plugin(path, content.get("megatron_lm_config") or {}),
        env=_environment(path, content),
    )


def _refuse_unknown(path: str, content: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "take it out."
            raise UsageError(f"--config_file {path} has the unknown key {key!r}; {hint}")


def _refuse_other_strategies(path: str, content: Mapping[str, Any]) -> None:
    kind = content.get("distributed_type", "MEGATRON_LM")
    kind = "NO" if kind is False else kind  # YAML's reading of an unquoted NO
    if kind not in _DISTRIBUTED_TYPES:
        raise UsageError(
            f"--config_file {path} has distributed_type {kind!r}; this launcher starts "
            "Megatron-LM jobs. Use accelerate launch for it, or set distributed_type: MEGATRON_LM."
        )
    for key in _OTHER_STRATEGIES:
        value = content.get(key)
        is_off = value in (None, False, {}, "", "NO", "no")
        if not is_off:
            raise UsageError(
                f"--config_file {path} has {key}: {value!r}, which cannot be combined with "
                "Megatron-LM; take it out."
            )


def _job(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = {}
    for key, kind in JOB_KEYS.items():
        value = content.get(key)
        if value is None or (key == "num_processes" and value == -1):
            continue
        if value is False and key == "mixed_precision":  # YAML's reading of an unquoted no
            value = "no"
        try:
            job[key] = kind(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"--config_file {path} has {key}: {value!r}; it must be a number."
            ) from None
    if _is_on(path, content, "use_cpu"):
        job["cpu"] = True
    return job


def _is_on(path: str, content: Mapping[str, Any], key: str) -> bool:
    return parse_bool(str(content.get(key) or "false"), f"--config_file {path}: {key}")


def _plugin(path: str, section: Mapping[str, Any]) -> dict[str, str]:
    where = f"{path}, megatron_lm_config"
    known = tuple(_PREFIX + name for name in FIELD) + tuple(FIELD)
    _refuse_unknown(where, section, known)
    variables = {}
    for key, value in section.items():
        plugin_field = FIELD[key.removeprefix(_PREFIX)]
        if value is None:
            continue
        word = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        plugin_field.parse(word, f"--config_file {where}: {key}")
        variables[plugin_field.variable] = word
    return variables


def _environment(path: str, content: Mapping[str, Any]) -> dict[str, str]:
    env = {}
    if content.get("gpu_ids") not in (None, "all"):
        env["CUDA_VISIBLE_DEVICES"] = str(content["gpu_ids"])
    if _is_on(path, content, "debug"):
        env["ACCELERATE_DEBUG_MODE"] = "true"
    if _is_on(path, content, "enable_cpu_affinity"):
        env["ACCELERATE_CPU_AFFINITY"] = "1"
    return env


# --- which source wins -------------------------------------------------------------------


def merged(
    flags: Mapping[str, Any], file: Mapping[str, Any], environ: Mapping[str, Any], file_name: str
) -> tuple[dict[str, Any], list[str]]:
    """Return each setting's value, from the flag, else the file; and what was overruled.

    Args:
        flags: Settings that flags give.
        file: Settings that the file gives.
        environ: What the environment says of the same settings; where nothing else is said, it
            stays where it is.
        file_name: For the text.

    Returns:
        The settings of flags and file, and one text for each overruled value.
    """
    values = {**file, **flags}
    overruled = []
    for name, value in values.items():
        source = "flag" if name in flags else file_name
        losers = [(file_name, file)] if name in flags else []
        for loser, said in [*losers, ("environment", environ)]:
            if name in said and str(said[name]) != str(value):
                overruled.append(f"{name}={value} ({source}) over {said[name]} ({loser})")
    return values, overruled


def precedence_note(overruled: list[str]) -> list[str]:
    """Return the one line that says which source won; none when none disagree."""
    if not overruled:
        return []
    return [f"sources disagree, flag before file before environment: {'; '.join(overruled)}."]
