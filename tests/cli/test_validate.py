"""Checks on values: ranges, choices, options against each other, files, options that this version lacks."""

import pytest

from flame.cli import names
from flame.cli.parse import parse_args
from flame.cli.validate import find_faults
from flame.errors import ConfigError
from flame.options import default_of, rule_of

JOB = ["--model.config", "org/model", "--training.dataset", "builtin:stdlib"]


def faults(*argv):
    try:
        parse_args([*JOB, *argv])
    except ConfigError as error:
        return error.faults
    return []


def test_a_complete_job_has_no_fault():
    assert faults() == []


@pytest.mark.parametrize(
    ("option", "bad", "allowed"),
    [
        ("training.seq_len", "0", "at least 1"),
        ("training.steps", "-3", "at least 1"),
        ("training.batch_size", "-1", "at least 0"),
        ("training.max_norm", "0", "above 0"),
        ("training.max_norm", "nan", "above 0"),
        ("training.num_workers", "-1", "at least 0"),
        ("training.data_parallel_shard_degree", "-2", "at least -1"),
        ("training.seed", str(2**63), "at least 0 and at most 9223372036854775807"),
        ("optimizer.lr", "-1", "at least 0 and below inf"),
        ("optimizer.lr", "inf", "at least 0 and below inf"),
        ("optimizer.beta1", "1", "at least 0 and below 1"),
        ("optimizer.beta2", "1.5", "at least 0 and below 1"),
        ("optimizer.eps", "0", "above 0 and below inf"),
        ("lr_scheduler.decay_ratio", "1.5", "at least 0 and at most 1"),
        ("lr_scheduler.lr_min", "-0.1", "at least 0 and at most 1"),
        ("lr_scheduler.warmup_steps", "-1", "at least 0"),
        ("metrics.log_freq", "0", "at least 1"),
        ("checkpoint.interval", "0", "at least 1"),
        ("checkpoint.load_step", "-2", "at least -1"),
        ("comm.trace_buf_size", "-1", "at least 0"),
        ("checkpoint.export_dtype", "fp8", "one of float32, float16, bfloat16"),
        ("optimizer.name", "Lion", "one of AdamW, Adam, SGD"),
        ("training.fsdp_reshard_after_forward", "sometimes", "one of default, always, never"),
    ],
)
def test_limits(option, bad, allowed):
    (fault,) = faults(f"--{option}", bad)
    assert fault.startswith(f"--{option} = ")
    assert f": must be {allowed}" in fault


@pytest.mark.parametrize(
    "words",
    [
        ["--training.max_norm", "inf"],
        ["--lr_scheduler.decay_ratio", "0"],
        ["--lr_scheduler.warmup_steps", "0"],
        ["--lr_scheduler.warmup_steps", "10", "--training.steps", "10"],
        ["--lr_scheduler.warmup_steps", "1024", "--training.steps", "10"],
        ["--optimizer.name", "SGD"],
        ["--training.context_len", "2048", "--training.seq_len", "2048"],
        ["--training.seq_len", "16"],
        ["--training.steps", "10"],
        ["--training.num_workers", "0"],
        ["--checkpoint.interval_type", "step"],
        ["--training.data_probs", "1.0"],
        ["--training.data_files", "a.txt,b.txt"],
        ["--no-training.compile"],
        ["--activation_checkpoint.mode", "none"],
    ],
)
def test_edges_that_are_allowed(words):
    assert faults(*words) == []


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ["--training.seq_len", "1024", "--training.context_len", "2048"],
            "--training.context_len = 2048: at most training.seq_len, which is 1024",
        ),
        (
            ["--training.seq_len", "70000", "--training.batch_size", "70000"],
            "--training.seq_len = 70000: batch_size * seq_len is 4900000000, more than the 2147483647 tokens of a row",
        ),
        (
            ["--training.dataset", "a,,b"],
            '--training.dataset = ["builtin:stdlib", "a", "", "b"]: an entry between two commas is empty',
        ),
        (
            ["--checkpoint.folder", "../elsewhere"],
            '--checkpoint.folder = "../elsewhere": is a folder inside job.dump_folder: no absolute path, no ..',
        ),
        (
            ["--optimizer.name", "SGD", "--optimizer.implementation", "fused"],
            '--optimizer.implementation = "fused": SGD over sharded parameters has no fused form; use foreach',
        ),
        (["--training.data_probs", "0.5"], "--training.data_probs = [0.5]: must sum to 1, not 0.5"),
        (
            ["--training.dataset_name", "a,b"],
            '--training.dataset_name = ["a", "b"]: 2 for 1 datasets; give one for each, or one for all',
        ),
        (
            ["--no-checkpoint.enable_checkpoint", "--checkpoint.load_step", "5"],
            "--checkpoint.load_step = 5: nothing is loaded while checkpoint.enable_checkpoint is off",
        ),
        (
            ["--job.sample_prompt", "def", "--no-checkpoint.export_hf"],
            '--job.sample_prompt = "def": samples from the exported model: needs checkpoint.export_hf',
        ),
        (
            ["--float8.scaling_type_input", "delayed"],
            '--float8.scaling_type_input = "delayed": torchao dropped delayed scaling: use dynamic',
        ),
        (
            ["--training.data_parallel_shard_degree", "0"],
            "--training.data_parallel_shard_degree = 0: set it to -1 or at least 1",
        ),
        (
            ["--model.tokenizer_path", "configs/tokenizr"],
            '--model.tokenizer_path = "configs/tokenizr": no such file or folder; did you mean configs/tokenizer?',
        ),
        (["--job.dump_folder="], '--job.dump_folder = "": needs the name of a folder'),
    ],
)
def test_options_against_each_other(words, fault):
    assert faults(*words) == [fault]


def test_probabilities_and_names_are_counted_against_the_datasets():
    with pytest.raises(ConfigError) as error:
        parse_args(["--model.config", "a/b", "--training.dataset", "a,b", "--training.data_probs", "0.5,0.3,0.3"])
    assert [each.partition(" = ")[0] for each in error.value.faults] == [
        "--training.data_probs",
        "--training.data_probs",
    ]


@pytest.mark.parametrize("key", ["dataset_name", "dataset_split", "data_dir", "data_files"])
def test_one_value_serves_all_datasets(key):
    assert faults("--training.dataset", "a,b", f"--training.{key}", "x") == []
    (fault,) = faults("--training.dataset", "a,b", f"--training.{key}", "x,y")
    assert fault.endswith("2 for 3 datasets; give one for each, or one for all")


def test_what_a_job_needs():
    with pytest.raises(ConfigError) as error:
        parse_args(["--model.config", "configs/debug.json/../x.json"])
    assert [each.partition(" = ")[0] for each in error.value.faults] == [
        "--model.tokenizer_path",
        "--training.dataset",
        "--model.config",
    ]


def test_missing_files_name_what_is_nearby(tmp_path):
    (tmp_path / "gla_340M.json").touch()
    missing = tmp_path / "gla_340m.jsn"
    found = faults("--checkpoint.initial_load_path", str(missing))
    assert found == [
        f'--checkpoint.initial_load_path = "{missing}": no such file or folder; '
        f"did you mean {tmp_path / 'gla_340M.json'}?"
    ]


def test_run_folder_may_not_be_a_file(tmp_path):
    (tmp_path / "run").touch()
    assert faults("--job.dump_folder", str(tmp_path / "run"))[0].endswith("is a file; the run needs a folder")


def other_value(option):
    rule, default = rule_of(option), default_of(option)
    if rule.choices:
        other = next(each for each in rule.choices if each != default)
        return [other] if isinstance(default, list) else other
    kind = str(option.type).removesuffix(" | None")
    return {"bool": True, "int": 7, "str": "x", "list[str]": ["x"]}[kind]


LATER = [name for name, option in names.options().items() if rule_of(option).not_yet]


@pytest.mark.parametrize("name", LATER)
def test_what_this_version_lacks_is_refused(name):
    config = parse_args(JOB)
    section, _, key = name.partition(".")
    value = other_value(names.options()[name])
    setattr(getattr(config, section), key, value)
    (fault,) = find_faults(config)
    assert fault[0] == name
    assert "not available in this version; " in fault[1]


@pytest.mark.parametrize(
    "flag",
    [
        "--training.compile",
        "--training.enable_cpu_offload",
        "--experimental.enable_compiled_autograd",
        "--float8.enable_float8_linear",
        "--checkpoint.async_mode=async",
        "--memory_estimation.enabled",
        "--fault_tolerance.enable",
        "--optimizer.early_step_in_backward",
    ],
)
def test_later_features_by_their_flag(flag):
    (fault,) = faults(flag)
    assert fault.startswith(flag.partition("=")[0])
    assert "not available in this version" in fault
