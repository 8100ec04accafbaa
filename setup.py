"""Finds the packages: each top-level folder of code is imported as ``baton.<folder>``, and entrypoints/package as
``baton`` itself.

Everything else about the project is in pyproject.toml. Setuptools can find packages from there, too, but not rename
them on the way.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

project = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())
folders = set(project["tool"]["setuptools"]["package-dir"].values()) - {"entrypoints/package"}
found = find_packages(include=[pattern for folder in folders for pattern in (folder, f"{folder}.*")])

setup(packages=["baton", *(f"baton.{package}" for package in found if package != "entrypoints.package")])
