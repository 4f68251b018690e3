"""Child processes that compile or run programs beside this one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jax

from jpets.engine.programs.store import platforms_variable


def renice(process: subprocess.Popen[str], niceness: int) -> bool:
    """Gives a process another niceness, or this process's own where that is higher. False where that is not allowed:
    anyone may raise a niceness, and few may lower one (``CAP_SYS_NICE``)."""
    least = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
    try:  # on Linux each thread has its own
        threads = list(map(int, os.listdir(f"/proc/{process.pid}/task")))
    except OSError:
        threads = [process.pid]
    for thread in threads:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, least)
        except ProcessLookupError:
            pass  # it has ended
        except PermissionError:
            return False
    return True


def start_child(
    module: str, arguments: Sequence[str], devices: Sequence[jax.Device], settings: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Starts ``python -m module`` with these arguments and the devices' numbers behind them, to be talked to by pipes.

    ``settings`` are those of ``settings_as_variables``. The process finds this code and these devices; their memory
    belongs to this process.
    """
    local = jax.local_devices(backend=devices[0].platform)  # those of the default platform alone without a name
    numbers = [local.index(device) for device in devices]
    root = str(pathlib.Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            **settings,
            "JAX_PLATFORMS": platforms_variable(devices[0].platform),
            "JAX_NUM_CPU_DEVICES": str(1 + max(numbers)),
            "PYTHONPATH": os.pathsep.join(paths),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
    )
