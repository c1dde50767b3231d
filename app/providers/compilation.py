"""Keeping compiled programs from one run to the next."""

from __future__ import annotations

from pathlib import Path

import jax

from app.models.model_cache import default_cache_dir


def keep_compiled_programs(folder: Path | None = None) -> None:
    """Let this process read and write compiled programs in a folder of the user's cache; JAX keys them by content.

    Changes JAX's settings for the whole process: for commands to call at start, not for libraries. Entries made by
    another version of jaxlib or on another kind of processor are not used.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder or default_cache_dir() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
