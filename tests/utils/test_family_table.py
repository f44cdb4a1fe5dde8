"""utils/family_table.py and utils/check_families.py: what a table cell says, and how a GPU run is judged."""

from __future__ import annotations

import json

import pytest

from flame.paths import PACKAGE_ROOT

if not (PACKAGE_ROOT.parent / "utils" / "family_table.py").exists():
    pytest.skip("needs a checkout", allow_module_level=True)

from utils import check_families, family_table

PASSED = {"state": "passed"}
STORE = {
    "cpu": {"gla": {"cpu_train": PASSED, "decode": {"state": "failed", "why": "a | b"}}, "sba": {}},
    "gpu": {"gla_340M": PASSED | {"first_loss": 10.5, "tokens_per_second": 212_000.4, "card": "H200", "commit": "abc"}},
}


def test_a_cell_is_never_green_by_skipping():
    _, _, gla, sba = family_table.families_table(STORE).splitlines()
    assert [cell.strip() for cell in gla.split(" | ")] == [
        "| gla", "passed", "passed (gla_340M)", "not run", "not run", "not run", "not run", "failed: a \\| b |",
    ]  # fmt: skip
    assert sba.count("not run") == 7


def test_gpu_numbers_carry_their_origin():
    line = family_table.gpu_table(STORE).splitlines()[-1]
    assert line == "| gla_340M | passed | 10.50 |  | 212,000 |  |  |  | H200 | abc |"
    assert family_table.gpu_table({"cpu": {}, "gpu": {}}) == "Not run yet."


def test_merging_replaces_single_cells():
    new = {"cpu": {"gla": {"decode": PASSED}}, "gpu": {"samba_1B": PASSED}}
    merged = family_table.merge(STORE, new)
    assert merged["cpu"]["gla"] == {"cpu_train": PASSED, "decode": PASSED}
    assert merged["gpu"].keys() == {"gla_340M", "samba_1B"}
    assert STORE["cpu"]["gla"]["decode"]["state"] == "failed"


@pytest.mark.parametrize(
    ("config", "family"),
    [("gla_340M", "gla"), ("sba_340m", "sba"), ("gated_deltanet_1B", "gated_deltanet"), ("gated_deltanet", None)],
)
def test_family_of_a_config(config, family):
    assert family_table.family_of(config) == (family or config)


def test_filling_a_page_keeps_the_rest():
    page = "a\n<!-- x: written by utils/family_table.py -->\nold\n<!-- end of x -->\nb\n"
    filled = family_table.fill(page, "x", "new")
    assert "old" not in filled and "\nnew\n" in filled and filled.startswith("a\n") and filled.endswith("\nb\n")
    assert family_table.fill(filled, "x", "new") == filled
    with pytest.raises(SystemExit):
        family_table.fill("nothing", "x", "new")


def test_a_run_on_a_cpu_is_no_gpu_cell(tmp_path):
    path = tmp_path / "gpu.json"
    family_table.save(path, {"cpu": {}, "gpu": {"gla": PASSED | {"card": "CPU"}}})
    with pytest.raises(SystemExit, match="ran on a CPU"):
        family_table.main(["--merge", str(path)])


def rows(*losses: float) -> list[dict]:
    return [{"loss": loss, "tps": 100.0, "memory_gib": 1.5, "step_time_s": 2.0} for loss in losses]


@pytest.mark.parametrize(
    ("code", "losses", "state", "why"),
    [
        (0, [10.0] + [8.9] * 9, "passed", None),
        (0, [10.0] + [9.1] * 9, "failed", "falls by less than 1"),
        (0, [10.0] + [8.0] * 8, "failed", "9 of 10 steps"),
        (1, [10.0], "failed", "RuntimeError: out of memory"),
        (2, [], "refused", "RuntimeError: out of memory"),
        (None, [10.0], "failed", "not done after 60 s, 1 of 10 steps"),
    ],
)
def test_judging_a_run(code, losses, state, why):
    log = "start\n\x1b[31mRuntimeError: out of memory\x1b[0m\n\n"
    result = check_families.judge(code, rows(*losses), log, limit=60, steps=10)
    assert result["state"] == state and (why is None or why in result["why"])
    assert "first_loss" not in result or result["first_loss"] == 10.0


def test_the_shipped_configs_of_the_smaller_class():
    names = [path.stem for path in check_families.default_configs()]
    assert {"transformer_340M", "gla_340M", "rwkv7_400M", "samba_1B", "sba_340m"} <= set(names)
    assert all(path.exists() for path in check_families.default_configs()) and "gla_7B" not in names


def test_a_run_on_this_machine(tmp_path):
    """Two steps of a tiny model, and a config that is refused; the second call leaves out nothing but what passed."""
    bad = tmp_path / "bad.json"
    bad.write_text('{"model_type": "glaa"}')
    gla = PACKAGE_ROOT.parent / "configs" / "debug" / "gla.json"
    output = tmp_path / "gpu.json"
    arguments = ["--output", str(output), "--configs", f"{gla},{bad}", "--seq_len", "64", "--steps", "2"]
    assert check_families.main(arguments) == 1
    found = json.loads(output.read_text())["gpu"]
    assert found["gla"]["steps"] == 2 and found["gla"]["tokens_per_second"] > 0 and found["gla"]["date"]
    assert found["gla"]["state"] == "failed", "two steps do not lower a loss by 1"
    assert found["bad"]["state"] == "refused" and "glaa" in found["bad"]["why"]
