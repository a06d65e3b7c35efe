"""What this machine has: cores, CUDA devices, torch's build. Answered without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

_CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CGROUP_V1_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


@dataclass(frozen=True)
class Machine:
    """The part of a machine that decides how ranks are started."""

    cores: int
    cuda_devices: int

    @classmethod
    def find(cls) -> Machine:
        """Look at the machine this process runs on."""
        return cls(cores=count_cores(), cuda_devices=count_cuda_devices())


def count_cores() -> int:
    """Return the cores this process may use: affinity and container quota taken into account."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _cgroup_quota() -> float | None:
    """Return the cores a container's CPU quota amounts to, or None without one."""
    if _CGROUP_V2_QUOTA.is_file():
        quota, period = _CGROUP_V2_QUOTA.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if _CGROUP_V1_QUOTA.is_file() and _CGROUP_V1_PERIOD.is_file():
        quota_us = int(_CGROUP_V1_QUOTA.read_text())
        return None if quota_us < 0 else quota_us / int(_CGROUP_V1_PERIOD.read_text())
    return None


def count_cuda_devices() -> int:
    """Return the CUDA devices that torch would see: 0 with a CPU build of torch.

    Asks the driver's library, which also honours CUDA_VISIBLE_DEVICES.
    """
    if torch_cuda_version() is None:
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def torch_cuda_version() -> str | None:
    """Return the CUDA version torch was built for; None for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return None
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", version_file.read_text(), flags=re.MULTILINE)
    return found.group(1) if found else None
