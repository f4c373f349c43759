"""One folder for everything that is compiled at run time, so that a restart compiles nothing.

DeepGEMM, Triton and FlashAttention-4 each keep a cache of their own, in places of their own, the
last of them only if asked to. Processes of one host share the folder; each library names its
entries by source, flags and version, so an upgrade leaves old entries unused, not wrong.
"""

import os
from pathlib import Path

VARIABLE = "TANDEM_JIT_CACHE"
"""Names the folder; where it is unset, `tandem/jit` below the user's cache folder is used."""


def use_jit_cache() -> Path:
    """Point the libraries at the folder and return it; call before any of them is imported.

    A variable of a library that is already set is left as it is.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(folder / "deep_gemm"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash_attention"))
    return folder


def _folder() -> Path:
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tandem" / "jit"
