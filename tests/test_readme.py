"""The README's commands: options are checked here, the rest is run by the tests of whole runs."""

from __future__ import annotations

import re
import shlex

import pytest

from flame.cli.parse import parse_args
from flame.cli.validate import find_faults
from flame.parallel.degrees import resolve_degrees
from flame.paths import PACKAGE_ROOT

ROOT = PACKAGE_ROOT.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(language: str) -> list[str]:
    pattern = rf"```{language}\n(.*?)```"
    return [block for path in DOCUMENTS for block in re.findall(pattern, path.read_text(), flags=re.DOTALL)]


def commands_with_variables(program: str) -> list[tuple[dict[str, str], list[str]]]:
    """What every command in the documents that starts with ``program`` sets, and its arguments."""
    lines = [line for block in code_blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    head = shlex.split(program)
    found = []
    for line in words:
        bare = [word for word in line if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if bare[: len(head)] == head:
            variables = dict(word.split("=", 1) for word in line if word not in bare)
            found.append((variables, bare[len(head) :]))
    return found


def commands(program: str) -> list[list[str]]:
    """The arguments of every command in the documents that starts with ``program``."""
    return [words for _, words in commands_with_variables(program)]


@pytest.mark.parametrize("words", commands("bash train.sh"), ids=" ".join)
def test_every_command_is_a_job_that_can_start(words):
    if not words or {"exp/demo/config.toml", "gated_recurrence.py"} & set(words):
        return  # the demo, what it leaves behind, and a model that another test takes from its document and trains
    assert find_faults(parse_args(words)) == []


def test_every_layout_divides():
    layouts = [each for each in commands_with_variables("bash train.sh") if "NGPU" in each[0]]
    assert len(layouts) >= 5
    for variables, words in layouts:
        resolve_degrees(parse_args(words), int(variables.get("NNODE", "1")) * int(variables["NGPU"]))


def test_there_are_commands():
    assert len(commands("bash train.sh")) >= 4
    assert commands("python -m flame.utils.convert_dcp_to_hf")


def test_every_link_leads_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"
