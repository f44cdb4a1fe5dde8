"""The tables of docs/models.md: kept as docs/families.json, filled by the tests and by utils/check_families.py.

    python utils/family_table.py                     # write docs/models.md from docs/families.json
    python utils/family_table.py --merge gpu.json    # first take over what utils/check_families.py wrote
    python utils/family_table.py --merge cpu.json    # or what python -m tests.runs.family_worker wrote
    python utils/family_table.py --configs           # measure the shipped configs anew (on paper, a minute)

Both kinds of results have the layout of docs/families.json: {"cpu": {family: {cell: result}}, "gpu": {config: result}}.
A result's state is ``passed``, ``refused`` or ``failed``, the last two with the reason in ``why``; what is missing was
not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "docs" / "families.json"
PAGE = ROOT / "docs" / "models.md"

Results = dict[str, dict[str, Any]]

CELLS = {
    "cpu_train": "CPU train",
    "varlen": "varlen isolation",
    "init": "init",
    "resume": "resume",
    "export": "export",
    "decode": "decode",
}
_BEGIN, _END = "<!-- {}: written by utils/family_table.py -->", "<!-- end of {} -->"


def read(path: Path) -> Results:
    """Results from a file, or none when it is not there."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"cpu": found.get("cpu", {}), "gpu": found.get("gpu", {})}


def merge(store: Results, new: Results) -> Results:
    """``store`` with the results of ``new`` in place of older ones of the same cell."""
    cpu = {family: dict(cells) for family, cells in store["cpu"].items()}
    for family, cells in new["cpu"].items():
        cpu.setdefault(family, {}).update(cells)
    return {"cpu": dict(sorted(cpu.items())), "gpu": dict(sorted((store["gpu"] | new["gpu"]).items()))}


def save(path: Path, results: Results) -> None:
    """Write results so that another process never sees half of them."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def family_of(config: str) -> str:
    """The family of a config's name: ``gla_340M`` and ``gla`` belong to gla."""
    name, _, size = config.rpartition("_")
    return name if name and size[:1].isdigit() else config


def families_table(results: Results) -> str:
    """Family × checks, in markdown."""
    lines = [f"| family | {CELLS['cpu_train']} | GPU train | {' | '.join(list(CELLS.values())[1:])} |"]
    lines.append("|---" * (len(CELLS) + 2) + "|")
    for family, cells in results["cpu"].items():
        row = [_cell(cells.get(cell)) for cell in CELLS]
        lines.append(f"| {' | '.join([family, row[0], _gpu_cell(results, family), *row[1:]])} |")
    return "\n".join(lines)


def gpu_table(results: Results) -> str:
    """One line for each config that was trained on a GPU, in markdown."""
    lines = [
        "| config | result | first loss | last losses | tokens/s | peak memory | first step | date | card | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for config, result in results["gpu"].items():
        numbers = [
            _number(result, "first_loss", ".2f"),
            _number(result, "last_loss", ".2f"),
            _number(result, "tokens_per_second", ",.0f"),
            _number(result, "memory_gib", ".1f", " GiB"),
            _number(result, "first_step_s", ".0f", " s"),
        ]
        origin = [str(result.get(key, "")) for key in ("date", "card", "commit")]
        lines.append(f"| {' | '.join([config, _cell(result), *numbers, *origin])} |")
    return "\n".join(lines) if results["gpu"] else "Not run yet."


def config_row(name: str, summary: dict[str, Any]) -> str:
    """The line of a shipped config, from what flame.utils.describe says at 2,048 and 65,536 tokens."""
    flops = {row["length"]: row["linear_flops"] + row["mixer_flops"] for row in summary["lengths"]}
    cells = [
        name,
        f"{summary['total'] / 1e6:,.1f}M",
        f"{summary['without_embedding'] / 1e6:,.1f}M",
        str(sum(summary["blocks"].values())),
        f"{flops[2048] / 1e9:.2f} G",
        f"{flops[65_536] / 1e9:.2f} G",
        f"{summary['state_bytes'] / 2**20:.1f} MiB",
        f"{summary['cache_bytes'] / 2**10:.0f} KiB",
    ]
    return f"| {' | '.join(cells)} |"


def configs_table() -> str:
    """One line for each shipped config, in markdown."""
    lines = [
        "| config | parameters | without embedding | blocks | FLOPs at 2,048 | at 65,536 | state | cache per token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    sys.path.insert(0, str(ROOT))  # run from a checkout, flame need not be installed
    from flame.utils.describe import load_summary

    for path in sorted(ROOT.glob("configs/*.json")):
        summary = load_summary(["--model.config", str(path)], [2048, 65_536])
        lines.append(config_row(path.stem, summary.as_dict()))
    return "\n".join(lines)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    why = result.get("why", "").replace("|", "\\|").replace("\n", " ")
    return result["state"] if result["state"] == "passed" else f"{result['state']}: {why}"


def _gpu_cell(results: Results, family: str) -> str:
    own = {config: result for config, result in results["gpu"].items() if family_of(config) == family}
    return ", ".join(f"{result['state']} ({config})" for config, result in own.items()) or "not run"


def _number(result: dict[str, Any], key: str, form: str, unit: str = "") -> str:
    value = result.get(key)
    return "" if value is None else f"{value:{form}}{unit}"


def fill(page: str, name: str, content: str) -> str:
    """``page`` with ``content`` between the marks of ``name``."""
    begin, end = _BEGIN.format(name), _END.format(name)
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE}: the marks {begin} and {end} are missing")
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--merge", type=Path, action="append", default=[], help="take over the results of this file")
    parser.add_argument("--configs", action="store_true", help="measure the shipped configs anew")
    options = parser.parse_args(arguments)
    results = read(STORE)
    for path in options.merge:
        new = read(path)
        elsewhere = [config for config, result in new["gpu"].items() if result.get("card") == "CPU"]
        if elsewhere:
            raise SystemExit(f"{path}: {', '.join(elsewhere)} ran on a CPU; the column is about GPUs")
        results = merge(results, new)
    save(STORE, results)
    page = fill(PAGE.read_text(encoding="utf-8"), "families", families_table(results))
    page = fill(page, "GPU runs", gpu_table(results))
    PAGE.write_text(fill(page, "configs", configs_table()) if options.configs else page, encoding="utf-8")


if __name__ == "__main__":
    main()
