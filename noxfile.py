"""What the project checks. ``python -m nox`` runs all of it, the longest session last."""

import os
import shutil
import subprocess

import nox

nox.needs_version = ">=2025.2.9"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "docs", "soak", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")


def newest(*versions: str) -> str | None:
    """The first of these Pythons that is there and starts; None: the one that runs nox."""
    for version in versions:
        if command := shutil.which(f"python{version}"):
            # pyenv leaves commands on the path that only say no.
            tried = subprocess.run([command, "-c", ""], check=False, capture_output=True)  # noqa: S603 (found on PATH)
            if not tried.returncode:
                return version
    return None


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules, ruff's format, and which module may import which."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Pyright, strict, over the package and over code written as a user would."""
    session.install(".[test]", *nox.project.dependency_groups(PROJECT, "types"))
    session.run("pyright", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation in docs/_build/html; a warning is an error."""
    session.install(".", *nox.project.dependency_groups(PROJECT, "docs"))
    strictly = ("--fail-on-warning", "--keep-going", "--fresh-env")
    session.run("sphinx-build", *strictly, *session.posargs, "docs", "docs/_build/html")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests; arguments after ``--`` go to pytest."""
    session.install(".[test]")
    session.run("pytest", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Load and chaos on both stores, for two minutes; ``-- --seconds 3600`` for an hour."""
    session.install(".[test]")
    # One minute where other checks wait for it.
    seconds = "60" if os.environ.get("CI") else "120"
    session.run("python", "-m", "tests.soak", *(session.posargs or ("--seconds", seconds)))


@nox.session(python=newest("3.13", "3.12", "3.14"))
def bench(session: nox.Session) -> None:
    """The benchmarks, beside the peers; not among the default sessions. ``-- --quick``: 3 minutes.

    Two peers need Python 3.13; where no such interpreter is found the report says who is missing.
    """
    session.install(".[postgres]", "-r", "benchmarks/requirements.txt")
    session.run("python", "-m", "benchmarks", *session.posargs)
