"""The examples in README.md and docs/ do what the text around them says.

Two comments, which no reader sees, make an example count. ``<!-- file: NAME -->`` in front of a
Python block says that the reader is to put it into that file, and ``<!-- run -->`` in front of a
console block that its commands print what stands below them (``...`` for anything). All files and
runs of a page share one folder, in the order of the page. Every other Python block has to be
Python.
"""

import ast
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n\n?)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.M
)


class Block(NamedTuple):
    mark: str
    kind: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    source = (ROOT / page).read_text()
    for match in BLOCK.finditer(source):
        line = source.count("\n", 0, match.start("text")) + 1
        yield Block(match["mark"] or "", match["kind"], match["text"], line)


def has_examples(page: str) -> bool:
    return any(block.mark == "run" or block.mark.startswith("file: ") for block in blocks(page))


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    plain = {key: value for key, value in os.environ.items() if not key.startswith("TRIO_WATCHDOG")}
    return plain | {"PYTHONPATH": path, "COLUMNS": "80", "NO_COLOR": "1"}


def command(line: str) -> list[str]:
    name, *arguments = shlex.split(line)
    modules = {"trio-watchdog": "trio_watchdog", "pytest": "pytest"}
    if name in modules:
        return [sys.executable, "-m", modules[name], *arguments]
    assert name == "python", f"{line!r}: only python, pytest and trio-watchdog can be run here"
    return [sys.executable, *arguments]


def steps(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with what it is to print."""
    for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, expected = step.partition("\n")
        yield line, expected


def is_like(output: str, expected: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.rstrip().split("..."))
    return re.fullmatch(pattern, output.rstrip(), re.DOTALL) is not None


def follow(page: str, folder: Path) -> None:
    """Do what the page tells its reader to do."""
    for block in blocks(page):
        where = f"{page}:{block.line}"
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.mark == "run":
            assert block.kind == "console", where
            for line, expected in steps(block.text):
                done = subprocess.run(
                    command(line),
                    check=False,
                    capture_output=True,
                    text=True,
                    cwd=folder,
                    env=environment(),
                    timeout=120,
                )
                assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"
                assert is_like(done.stdout, expected), f"{where}: {line}\n{done.stdout}"
        else:
            assert not block.mark or block.mark.endswith("."), f"{where}: unknown {block.mark!r}"


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_is_python(page: str) -> None:
    for block in blocks(page):
        if block.kind == "python":
            try:
                # `await` and `async with` may stand alone in a fragment.
                ast.parse("async def fragment():\n" + textwrap.indent(block.text, "    "))
            except SyntaxError as error:
                pytest.fail(f"{page}:{block.line}: {error}")


def test_every_test_that_the_guarantees_name_is_there() -> None:
    text = (ROOT / "docs/explanation/guarantees.md").read_text()
    named = set(
        re.findall(r"`((?:docs|ground|postgres|process|runtime|store)/test_\w+\.py)`", text)
    )
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if has_examples(page)])
def test_the_examples_of_a_page_print_what_it_says(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path)


def test_the_quick_start_is_the_one_in_examples_and_runs(tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks("README.md") if block.kind == "python"]
    assert code == (ROOT / "examples" / "quickstart.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) < 25

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
            timeout=60,
        ).stdout

    last = "greet-Grace: completed after 1 attempt\n"
    assert run() == f"Hello, Ada!\nHello, Grace!\n{last}"
    assert run() == last


# -- the part of the tutorial that needs two terminals ---------------------------------------------


@contextlib.contextmanager
def worker(folder: Path, output: Path) -> Generator[subprocess.Popen[bytes]]:
    """The tutorial's worker, with what it prints in a file."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command("trio-watchdog run worker:lanes --database sqlite:shop.db"),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(),
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.02)


def said(output: Path, *words: str) -> Callable[[], bool]:
    return lambda: all(word in output.read_text() for word in words)


def listed(folder: Path) -> str:
    line = "trio-watchdog list --lane count --database sqlite:shop.db"
    return subprocess.run(
        command(line), check=True, capture_output=True, text=True, cwd=folder, env=environment()
    ).stdout


def test_the_killed_worker_of_the_tutorial_recovers_as_it_says(tmp_path: Path) -> None:
    follow("docs/tutorial.md", tmp_path)
    killed, restarted = tmp_path / "killed.txt", tmp_path / "restarted.txt"
    with worker(tmp_path, killed) as process:
        wait_for(said(killed, f"at work, process {process.pid}; Ctrl-C drains"))
        wait_for(said(killed, "careful: 1 of 30", "robust: 1 of 30"))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [line.split()[:4] for line in listed(tmp_path).splitlines()[1:]] == [
        ["robust", "count", "-", "running"],
        ["careful", "count", "-", "running"],
    ]
    began = time.monotonic()
    with worker(tmp_path, restarted) as process:
        wait_for(said(restarted, "robust: 1 of 30"))
        # At once, and not after the lease of two minutes.
        assert time.monotonic() - began < 60
        wait_for(
            said(
                restarted,
                "job 'careful' of lane 'count' disappeared: settled as interrupted"
                " (the execution disappeared; no recovery is allowed)",
                "job 'robust' of lane 'count' disappeared: queued again",
            )
        )
        process.send_signal(signal.SIGINT)
        wait_for(said(restarted, "draining, 1 job running; again interrupts"))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    after = {line.split()[0]: line for line in listed(tmp_path).splitlines()[1:]}
    assert "settled: interrupted" in after["careful"]
    # The attempt that disappeared counts, the one that was handed back does not.
    assert after["robust"].split()[3:5] == ["queued", "1"]
    assert "recovered 1x" in after["robust"]
