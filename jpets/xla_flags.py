"""Settings of XLA that can only be made before its first use in a process."""

from __future__ import annotations

import os

FLAGS = ("--xla_cpu_enable_concurrency_optimized_scheduler=false", "--xla_gpu_dot_merger_threshold_mb=0")
"""XLA's default order on a CPU starts the gathers of every layer at once. What they fetch for all layers then needs so
much memory that each run gets fresh pages from the system, which costs 4 % of a BERT-base batch with adapters.

For a GPU it joins products that share an operand. Heavy classes write to the results of q, k and v, which would first
be copied out of a common one, 150 MB a layer of BERT-base for 16,384 tokens; ``Sites.linear`` joins them where it
pays."""


def set_xla_flags(*, preallocate: bool = True) -> None:
    """Adds our flags to ``XLA_FLAGS`` where the user has not set them. Entry points call it before they touch JAX.

    Without ``preallocate`` a GPU's memory is taken as it is needed, for processes that must leave some of it to others.
    """
    if not preallocate:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in FLAGS if flag.partition("=")[0] not in given]
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
