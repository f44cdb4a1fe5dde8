"""The packages whose first lines say what each module answers leave none out, and name none that is gone."""

from __future__ import annotations

import ast
import re

import pytest

from flame.paths import PACKAGE_ROOT


@pytest.mark.parametrize("package", ["data", "parallel", "training"])
def test_every_module_has_its_line(package):
    folder = PACKAGE_ROOT / package
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    table = re.search(r"^=+ =+$\n(.*)^=+ =+$", text, re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r"^(\w+)", table, re.MULTILINE)
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert set(rows) <= modules
    assert modules - set(rows) <= set(re.findall(r"``(\w+)``", table))
