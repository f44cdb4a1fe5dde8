"""The help text, made from the typed config: sections, options, types, defaults, allowed values, meanings, aliases."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from functools import cache

import flame.config
from flame.cli import names
from flame.cli.values import EXPECTED, show
from flame.options import ALIASES, default_of, rule_of

INTRODUCTION = """\
usage: bash train.sh [--section.name value] ...   (installed as a package: flame-train)

Train a language model. Options come from the command line, then from the TOML file --job.config_file
([section] name = value), then from the defaults. `--section.name value` and `--section.name=value` are the same;
a switch is turned on with --section.name [true], and off with --section.name false or --no-section.name;
a list takes commas.

  -h, --help  show this text
  environment: NGPU (processes on this machine; default: one per visible GPU, 1 on a CPU), NNODE (1), LOG_RANK (0),
  MASTER_ADDR and MASTER_PORT (with several nodes), WANDB_*
"""


def format_help() -> str:
    """The whole help text, as wide as the terminal."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    parts = [INTRODUCTION]
    for section, section_type in names.sections().items():
        entries = [_format_option(name, width) for name in names.options() if name.startswith(f"{section}.")]
        entries += [_format_alias(name) for name in ALIASES if name.startswith(f"{section}.")]
        parts.append("\n".join([f"[{section}] {section_type.__doc__}", *entries, ""]))
    return "\n".join(parts)


@cache
def field_docs() -> dict[str, str]:
    """The docstring under each field of the config, by ``ClassName.field``, on one line."""
    docs = {}
    for node in ast.parse(inspect.getsource(flame.config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field_node, doc_node in zip(node.body, node.body[1:], strict=False):
            if isinstance(field_node, ast.AnnAssign) and isinstance(doc_node, ast.Expr):
                docs[f"{node.name}.{field_node.target.id}"] = " ".join(doc_node.value.value.split())
    return docs


def _format_option(name: str, width: int) -> str:
    option = names.options()[name]
    rule = rule_of(option)
    default = default_of(option)
    section_type = names.sections()[name.partition(".")[0]]
    shown_default = "unset" if default is None else show(default)
    facts = [EXPECTED[names.kind_of(name)], rule.describe(), f"default: {shown_default}"]
    head = f"--{name} ({'; '.join(filter(None, facts))})"
    lines = [field_docs()[f"{section_type.__name__}.{option.name}"]]
    if rule.not_yet:
        lines.append(f"Not available in this version: {rule.not_yet}.")
    lines += [f"{value} is refused: {reason}." for value, reason in rule.refused.items()]
    wrap = textwrap.TextWrapper(width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
    return wrap.fill(f"  {head}") + "\n" + wrap.fill(" " * 6 + " ".join(lines))


def _format_alias(name: str) -> str:
    alias = ALIASES[name]
    if not alias.values:
        return f"  --{name}\n      Older name of --{alias.target}."
    on, off = (show(alias.values[each]) for each in (True, False))
    return f"  --{name} (true or false)\n      Older name of --{alias.target}: true is {on}, false is {off}."
