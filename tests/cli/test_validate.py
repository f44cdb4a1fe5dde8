"""Checks on values: ranges, choices, options against each other, files, options that this version lacks."""

import pytest

from flame.cli import names
from flame.cli.parse import parse_args
from flame.cli.validate import find_faults
from flame.errors import ConfigError
from flame.options import default_of, rule_of

JOB = ["--model.config", "org/model", "--training.dataset", "builtin:stdlib"]
NORM = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=norm"]


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
        ("experimental.pipeline_parallel_schedule", "2F2B", "one of 1F1B, GPipe, Interleaved1F1B"),
        ("activation_checkpoint.selective_ac_option", "²", "op, norm, or n for every n-th block"),
        ("activation_checkpoint.selective_ac_option", "0", "op, norm, or n for every n-th block"),
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
        NORM,
        ["--activation_checkpoint.selective_ac_option", "norm", "--training.compile"],
        ["--activation_checkpoint.mode", "auto", "--training.batch_size", "auto", "--job.device_memory_gib", "80"],
        ["--job.device_memory_gib", "80", "--job.dry_run"],
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
            ["--job.device_memory_gib", "80"],
            "--job.device_memory_gib = 80.0: goes with activation_checkpoint.mode or "
            "training.batch_size auto, or with job.dry_run",
        ),
        (
            ["--training.batch_size", "auto", "--training.compile"],
            '--training.batch_size = "auto": memory is not known in advance with training.compile; leave that out, or '
            "set training.batch_size yourself",
        ),
        (
            ["--activation_checkpoint.mode", "auto", "--model.converters", "float8"],
            '--activation_checkpoint.mode = "auto": memory is not known in advance with model.converters float8; leave '
            "that out, or set activation_checkpoint.mode yourself",
        ),
        (
            ["--training.batch_size", "auto", "--experimental.pipeline_parallel_degree", "2"],
            '--training.batch_size = "auto": the memory of a pipeline (experimental.pipeline_parallel_degree = 2) '
            "grows with its micro-batches, which do not grow with batch_size; give a number",
        ),
        (
            ["--activation_checkpoint.mode", "auto", "--activation_checkpoint.selective_ac_option", "3"],
            '--activation_checkpoint.selective_ac_option = "3": activation_checkpoint.mode auto takes op where it is '
            "selective; leave it out",
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
            ["--optimizer.early_step_in_backward"],
            "--optimizer.early_step_in_backward = true: every step reports the norm of all gradients, clips by it and "
            "can be skipped by it, so that no parameter can be updated before all gradients are there; leave it out",
        ),
        (
            ["--experimental.enable_async_tensor_parallel"],
            "--experimental.enable_async_tensor_parallel = true: torch overlaps collectives that are part of a "
            "compiled graph, and those of tensor parallelism run between graphs here; leave it out",
        ),
        (
            ["--experimental.enable_compiled_autograd"],
            "--experimental.enable_compiled_autograd = true: FSDP gathers and reduces in hooks of the backward pass, "
            "which torch cannot trace; leave it out: training.compile compiles the backward of each block too",
        ),
        (
            ["--fault_tolerance.enable"],
            "--fault_tolerance.enable = true: torchft's replica groups join and leave while a run goes on, and then "
            "its losses would not be those of one device; leave it out: after a loss the same command goes on from the "
            "last checkpoint",
        ),
        (
            ["--float8.enable_float8_linear", "--float8.force_recompute_fp8_weight_in_bwd"],
            "--float8.force_recompute_fp8_weight_in_bwd = true: torchao always casts the weights again in the backward "
            "pass now; leave it out",
        ),
        (
            [*NORM, "--training.compile"],
            '--activation_checkpoint.selective_ac_option = "norm": does not go with training.compile, which compiles '
            "norms into what is around them",
        ),
        (
            [*NORM, "--training.tensor_parallel_degree=2"],
            '--activation_checkpoint.selective_ac_option = "norm": does not go with training.tensor_parallel_degree '
            "above 1; op, a number or full do",
        ),
        (
            [*NORM, "--activation_offload.mode=full"],
            '--activation_checkpoint.selective_ac_option = "norm": does not go with activation_offload.mode full; full '
            "does",
        ),
        (
            [*NORM, "--model.converters", "float8"],
            '--activation_checkpoint.selective_ac_option = "norm": does not go with model.converters float8; op, a '
            "number or full do",
        ),
        (
            ["--float8.recipe_name", "rowwise"],
            '--float8.recipe_name = "rowwise": needs model.converters float8',
        ),
        (
            ["--float8.enable_fsdp_float8_all_gather"],
            "--float8.enable_fsdp_float8_all_gather = true: needs model.converters float8",
        ),
        (
            ["--model.converters", "float8", "--float8.recipe_name=rowwise", "--float8.enable_fsdp_float8_all_gather"],
            "--float8.enable_fsdp_float8_all_gather = true: goes with recipe_name tensorwise only",
        ),
        (
            ["--model.converters", "float8", "--float8.precompute_float8_dynamic_scale_for_fsdp"],
            "--float8.precompute_float8_dynamic_scale_for_fsdp = true: needs float8.enable_fsdp_float8_all_gather",
        ),
        (
            ["--model.converters", "float8", "--training.mixed_precision_param", "float32"],
            '--training.mixed_precision_param = "float32": float8 products come out in bfloat16; use that',
        ),
        (
            ["--model.converters", "float8", "--training.seq_len", "1000"],
            "--training.seq_len = 1000: must be a multiple of 16 with model.converters float8: 16 for each piece of a "
            "sequence",
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


@pytest.mark.parametrize("section", ["training", "validation"])
def test_an_empty_name_among_datasets_is_a_fault(section):
    job = ["--model.config", "org/model", "--training.dataset", "x"] if section == "validation" else JOB[:2]
    with pytest.raises(ConfigError) as error:
        parse_args([*job, f"--{section}.dataset", "a,,b", f"--{section}.dataset_split", "x,y"])
    assert [each.partition(" = ")[0] for each in error.value.faults] == [
        f"--{section}.dataset",
        f"--{section}.dataset_split",
    ]


@pytest.mark.parametrize(("key", "value"), [("interval", "5"), ("dataset_split", "test"), ("streaming", "true")])
def test_options_of_validation_need_its_dataset(key, value):
    (fault,) = faults(f"--validation.{key}", value)
    assert fault.startswith(f"--validation.{key} = ") and fault.endswith(
        "goes with validation.dataset, which is not given"
    )
    assert faults(f"--validation.{key}", value, "--validation.dataset", "x") == []


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


def test_what_is_never_on_the_hub_must_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("--checkpoint.initial_load_path", "--experimental.pipeline_parallel_schedule_csv"):
        for missing in ("run", "owner/run"):
            assert faults(name, missing) == [f'{name} = "{missing}": no such file or folder']
        (tmp_path / "there").touch()
        assert faults(name, "there") == []
    assert faults("--model.tokenizer_path", "owner/tokenizer") == []


def test_run_folder_may_not_be_a_file(tmp_path):
    (tmp_path / "run").touch()
    for name in ("--job.dump_folder", "--job.cache_dir"):
        assert faults(name, str(tmp_path / "run"))[0].endswith("is a file; the run needs a folder")
        assert faults(name, "~no_such_user/run") == []


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
        "--fault_tolerance.group_size=2",
    ],
)
def test_later_features_by_their_flag(flag):
    (fault,) = faults(flag)
    assert fault.startswith(flag.partition("=")[0])
    assert "not available in this version" in fault


def test_a_plan_says_for_how_many_processes():
    assert not faults("--job.dry_run", "--job.world_size", "512")
    assert not faults("--memory_estimation.enabled", "--job.world_size", "512")
    (fault,) = faults("--job.world_size", "512")
    assert "--job.world_size = 512: goes with job.dry_run" in fault
    (fault,) = faults("--memory_estimation.enabled", "--memory_estimation.disable_fake_mode")
    assert "tensors without memory" in fault
