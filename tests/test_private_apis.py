"""docs/private_apis.md lists every private name of a dependency with the file that uses it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flame.paths import PACKAGE_ROOT

ROOT = PACKAGE_ROOT.parent
FILES = sorted(path for folder in ("flame", "utils", "custom_models") for path in (ROOT / folder).rglob("*.py"))
PRIVATE = re.compile(r"_[a-z]\w*")


def parse(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def own_names() -> set[str]:
    """Names that the project itself defines or assigns."""
    names = set()
    for node in (node for path in FILES for node in parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def private_names(path: Path) -> Iterator[str]:
    """Private modules that are imported, attributes that are read or set, and those that getattr is asked for."""
    for node in parse(path):
        if isinstance(node, ast.ImportFrom):
            yield from [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) != "os._exit":  # public, in spite of its name
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            yield getattr(node.args[1], "value", "")


def listed() -> dict[str, str]:
    """File -> the names that the page's table has for it."""
    names: dict[str, str] = {}
    files: list[str] = []
    page = (ROOT / "docs" / "private_apis.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| ?(.*?) ?\| (.*?) \| .*\|$", page, flags=re.MULTILINE):
        files = re.findall(r"`(.*?)`", row[0]) or files
        for file in files:
            names[file] = names.get(file, "") + row[1]
    return names


def test_every_private_name_is_listed():
    own, table, missing = own_names() - {"_no_weight_decay"}, listed(), []
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        used = {name for name in private_names(path) if isinstance(name, str) and PRIVATE.fullmatch(name)} - own
        missing += [f"{file}: {name}" for name in sorted(used) if name not in re.findall(r"\w+", table.get(file, ""))]
    assert not missing


@pytest.mark.parametrize("file", listed())
def test_every_listed_name_is_used(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for name in re.findall(r"\b_[A-Za-z]\w*", listed()[file]):
        assert name in text, name
