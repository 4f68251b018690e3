"""JAX's own persistent compilation cache, under the same folder as the programs."""

from __future__ import annotations

import pathlib

import jax


def use_compilation_cache(folder: pathlib.Path) -> None:
    """Keeps every compilation, however short, below ``folder``; a cache that was set up before stays in use.

    It changes a setting of the whole process, so only entry points call it.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
