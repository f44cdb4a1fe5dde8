"""The command line: names, types, precedence, aliases, faults, help."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from flame.cli.parse import main, names, parse_args, to_toml
from flame.config import resolve_defaults
from flame.errors import ConfigError
from flame.options import ALIASES
from flame.paths import PACKAGE_ROOT

# What a job needs besides the options under test.
JOB = ["--model.config", "org/model", "--training.dataset", "builtin:stdlib"]

PUBLISHED = {
    "job": "config_file dump_folder description print_args use_for_integration_test",
    "model": "name config tokenizer_path norm_type converters print_after_conversion backend trust_remote_code",
    "profiling": "enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation fused early_step_in_backward scheduler "
    "min_lr_ratio",
    "lr_scheduler": "warmup_steps decay_ratio decay_type lr_min",
    "training": "batch_size seq_len context_len varlen gradient_accumulation_steps steps warmup_steps max_norm "
    "skip_nan_inf dataset dataset_name dataset_split data_dir data_files data_probs streaming num_workers "
    "prefetch_factor pin_memory persistent_workers data_parallel_replicate_degree data_parallel_shard_degree "
    "enable_cpu_offload tensor_parallel_degree disable_loss_parallel fsdp_reshard_after_forward "
    "mixed_precision_param mixed_precision_reduce compile gc_freq seed deterministic",
    "metrics": "log_freq enable_tensorboard save_tb_folder rank_0_only save_for_all_ranks disable_color_printing "
    "enable_wandb",
    "experimental": "enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_split_points "
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatches "
    "enable_compiled_autograd context_parallel_degree context_parallel_rotate_method custom_model_path",
    "checkpoint": "enable_checkpoint folder interval_type interval model_weights_only last_save_model_weights_only "
    "export_dtype create_seed_checkpoint async_mode keep_latest_k load_step initial_load_path "
    "initial_load_model_weights_only exclude_from_loading",
    "float8": "enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp "
    "force_recompute_fp8_weight_in_bwd recipe_name emulate scaling_type_input scaling_type_weight "
    "scaling_type_grad_output",
    "activation_checkpoint": "mode selective_ac_option",
    "activation_offload": "mode",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size",
    "memory_estimation": "enabled disable_fake_mode",
    "fault_tolerance": "enable replica_id group_size min_replica_size",
}
PUBLISHED_NAMES = [f"{section}.{key}" for section, keys in PUBLISHED.items() for key in keys.split()]

PUBLISHED_COMMAND = shlex.split("""--job.config_file flame/models/fla.toml --job.dump_folder exp/x
--model.config configs/transformer_340M.json --model.tokenizer_path fla-hub/transformer-1.3B-100B
--optimizer.name AdamW --optimizer.eps 1e-15 --optimizer.lr 1e-3 --lr_scheduler.warmup_steps 1024
--lr_scheduler.lr_min 0.1 --lr_scheduler.decay_type cosine --training.batch_size 1 --training.seq_len 65536
--training.context_len 4096 --training.varlen --training.gradient_accumulation_steps 1 --training.steps 20480
--training.max_norm 1.0 --training.skip_nan_inf --training.dataset HuggingFaceFW/fineweb-edu
--training.dataset_name sample-100BT --training.dataset_split train --training.num_workers 32
--training.prefetch_factor 2 --training.seed 42 --training.compile --checkpoint.interval 2048
--checkpoint.load_step -1 --checkpoint.keep_latest_k 2 --metrics.log_freq 1""")

SAMPLES = {"int": "3", "int or auto": "3", "auto": "true", "float": "0.25", "str": "x y"}
SAMPLES |= {"list[str]": "a,b", "list[float]": "0.5,0.5"}


def parse(*argv):
    return parse_args([*JOB, *argv])


def faults_of(*argv):
    with pytest.raises(ConfigError) as error:
        parse_args(list(argv))
    return error.value.faults


def value_of(config, name):
    section, _, key = names.target_of(name).partition(".")
    return getattr(getattr(config, section), key)


@pytest.fixture
def write_toml(tmp_path):
    def write(text):
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("name", [name for name in PUBLISHED_NAMES if name != "job.config_file"])
def test_published_flag_exists_on_the_command_line_and_in_toml(name, write_toml):
    kind = names.kind_of(name)
    words = [] if kind == "bool" else [SAMPLES[kind]]
    by_flag = value_of(parse_args([f"--{name}", *words], check=False), name)
    section, _, key = name.partition(".")
    in_toml = {"bool": "true", "str": '"x y"', "list[str]": '["a", "b"]', "list[float]": "[0.5, 0.5]"}
    text = f"[{section}]\n{key} = {in_toml.get(kind, SAMPLES.get(kind))}\n"
    assert value_of(parse_args(["--job.config_file", write_toml(text)], check=False), name) == by_flag


def test_every_option_is_in_the_help(capsys):
    assert main(["-h"]) == 0
    text = capsys.readouterr().out
    for name in [*names.options(), *ALIASES, *PUBLISHED_NAMES]:
        assert re.search(rf"^  --{re.escape(name)} \(|^  --{re.escape(name)}$", text, re.MULTILINE), name


def test_help_shows_type_default_choices_meaning_alias_and_refusal(capsys):
    main(["--training.steps", "5", "--help"])
    text = capsys.readouterr().out
    assert "--training.seq_len (a whole number; at least 1; default: 2048)\n      Tokens of a packed sequence." in text
    assert "one of AdamW, Adam, SGD" in text
    assert "--optimizer.scheduler\n      Older name of --lr_scheduler.decay_type." in text
    assert "Not available in this version" in text


def test_help_is_quick_and_imports_no_torch(tmp_path):
    spent = sum(os.times()[2:4])  # its children's processor time, whatever else runs beside them
    command = [sys.executable, "-X", "importtime", "-m", "flame.cli", "-h"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT.parent)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    assert sum(os.times()[2:4]) - spent < 2
    assert " torch" not in done.stderr
    assert "numpy" not in done.stderr


def test_published_command_is_taken_as_it_is():
    config = parse_args(PUBLISHED_COMMAND)
    assert (config.training.seq_len, config.training.context_len) == (65536, 4096)
    assert (config.training.varlen, config.training.skip_nan_inf) == (True, True)
    assert (config.optimizer.eps, config.lr_scheduler.lr_min) == (1e-15, 0.1)
    assert config.checkpoint.load_step == -1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.varlen"], True),
        (["--training.varlen", "true"], True),
        (["--training.varlen", "False"], False),
        (["--training.varlen=true"], True),
        (["--no-training.varlen"], False),
        (["--training.no-varlen"], False),
    ],
)
def test_switches(words, expected, write_toml):
    path = write_toml(f"[training]\nvarlen = {str(not expected).lower()}\n")
    assert parse("--job.config_file", path, *words).training.varlen is expected


def test_a_switch_that_is_an_alias_turns_off_too():
    assert parse("--no-optimizer.fused").optimizer.implementation == "foreach"
    assert parse("--metrics.no-rank_0_only").metrics.save_for_all_ranks is True


@pytest.mark.parametrize(
    "words",
    [
        ["--checkpoint.exclude_from_loading", "a,b"],
        ["--checkpoint.exclude_from_loading=a,b"],
        ["--checkpoint.exclude_from_loading", "a", "b"],
        ["--checkpoint.exclude_from_loading", "a", "--checkpoint.exclude_from_loading", "b"],
    ],
)
def test_lists_take_commas_blanks_and_repetition(words):
    assert parse(*words).checkpoint.exclude_from_loading == ["a", "b"]


def test_empty_list():
    assert parse("--checkpoint.exclude_from_loading=").checkpoint.exclude_from_loading == []


def test_blanks_and_signs_survive():
    config = parse("--job.description", "my  run = 5 --x", "--job.dump_folder=a b/c=d", "--optimizer.eps=1e-15")
    assert config.job.description == "my  run = 5 --x"
    assert config.job.dump_folder == "a b/c=d"
    assert config.optimizer.eps == 1e-15


def test_text_that_no_file_can_hold_is_a_fault(write_toml):
    assert faults_of(*JOB, "--job.description", "\udcff") == ['--job.description = "\udcff": must be text']
    path = write_toml('[job]\ndescription = "\\u0000"\n')
    (fault,) = faults_of(*JOB, "--job.config_file", path)
    assert "must be text" in fault


def test_command_line_before_toml_before_defaults(write_toml):
    path = write_toml("[training]\nsteps = 7\nseed = 8\n")
    config = parse("--training.steps", "9", "--job.config_file", path)
    assert (config.training.steps, config.training.seed, config.training.seq_len) == (9, 8, 2048)
    assert config.given["training.steps"] == "--training.steps"
    assert config.given["training.seed"] == f"{path}: training.seed"
    assert "training.seq_len" not in config.given


@pytest.mark.parametrize(
    ("words", "option", "expected"),
    [
        ("--optimizer.fused", "optimizer.implementation", "fused"),
        ("--optimizer.scheduler cosine", "lr_scheduler.decay_type", "cosine"),
        ("--optimizer.min_lr_ratio 0.1", "lr_scheduler.lr_min", 0.1),
        ("--training.warmup_steps 5", "lr_scheduler.warmup_steps", 5),
        ("--metrics.rank_0_only true", "metrics.save_for_all_ranks", False),
        ("--checkpoint.model_weights_only", "checkpoint.last_save_model_weights_only", True),
        ("--float8.enable_float8_linear false", "model.converters", []),
    ],
)
def test_aliases(words, option, expected):
    assert value_of(parse(*words.split()), option) == expected


def test_alias_on_the_command_line_overrides_its_option_in_toml(write_toml):
    path = write_toml("[lr_scheduler]\nwarmup_steps = 5\n")
    assert parse("--job.config_file", path, "--training.warmup_steps", "6").lr_scheduler.warmup_steps == 6


def test_both_names_with_different_values_is_a_fault(write_toml):
    both = ["--training.warmup_steps", "5", "--lr_scheduler.warmup_steps"]
    assert parse(*both, "5").lr_scheduler.warmup_steps == 5
    (fault,) = faults_of(*JOB, *both, "6")
    assert fault.startswith("--lr_scheduler.warmup_steps = 6: differs from --training.warmup_steps = 5")
    path = write_toml('[optimizer]\nfused = false\nimplementation = "fused"\n')
    (fault,) = faults_of(*JOB, "--job.config_file", path)
    assert "differs from" in fault


def test_typo_toml_names_every_fault(write_toml):
    path = write_toml(
        '[training]\nstep = 5\nseq_len = 0\nsteps = -3\n[trainnig]\nseed = "x"\n[optimizer]\nlr = "1e-3"\n'
    )
    assert faults_of(*JOB, "--job.config_file", path) == [
        f"{path}: training.step = 5: no such option; did you mean training.steps?",
        f"{path}: [trainnig]: no such section; did you mean [training]?",
        f'{path}: trainnig.seed = "x": must be a whole number without quotes',
        f'{path}: optimizer.lr = "1e-3": must be a number without quotes',
        f"{path}: training.seq_len = 0: must be at least 1",
        f"{path}: training.steps = -3: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--training.step 5", "--training.step 5: no such option; did you mean --training.steps?"),
        ("--trainnig.steps 5", "--trainnig.steps 5: no such option; did you mean --training.steps?"),
        ("--steps 5", "--steps 5: no such option; did you mean --training.steps?"),
        ("--training.seq-len 5", "--training.seq-len 5: no such option; did you mean --training.seq_len?"),
        ("--training.steps five", '--training.steps = "five": must be a whole number'),
        ("--training.steps 1.5", '--training.steps = "1.5": must be a whole number'),
        ("--training.steps", "--training.steps: needs a value: a whole number"),
        ("--training.steps 5 6", '--training.steps = "5 6": takes one value'),
        ("--training.steps 5 --training.steps 6", "--training.steps = 6: given twice, first as 5"),
        ("--training.varlen yes", '--training.varlen = "yes": must be true or false'),
        ("--no-training.varlen true", '--no-training.varlen = "true": takes no value'),
        ("--no-training.steps", "--no-training.steps: only a switch can be turned off like this; --training.steps"),
        (
            "--job.description my run",
            '--job.description = "my run": takes one value; put a value with blanks in quotes',
        ),
        ("--optimizer.name adamw", '--optimizer.name = "adamw": must be one of AdamW, Adam, SGD; did you mean AdamW?'),
    ],
)
def test_faults_on_the_command_line(words, fault):
    (found,) = faults_of(*JOB, *words.split())
    assert found.startswith(fault)


def test_stray_word_is_a_fault():
    assert faults_of("junk", *JOB) == ['"junk": not a flag; options are written --section.name value']


def test_faults_of_both_sources_come_together(write_toml, capsys):
    path = write_toml("[training]\nstep = 5\n")
    assert main(["--check", "--job.config_file", path, "--training.seq_len", "0", "--nonsense"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert [line.partition("=")[0].strip() for line in lines[-2:]] == ["--model.config", "--training.dataset"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[training]\nsteps = = 5\n", "cannot be read as TOML: Invalid value (at line 2, column 9)"),
        ("[training]\nsteps = 5\nsteps = 6\n", "cannot be read as TOML: Cannot overwrite a value (at line 3"),
        ("steps = 5\n", "steps = 5: an option must stand in a section; did you mean training.steps?"),
        ("[training]\nsteps = true\n", "training.steps = true: must be a whole number"),
        ("[training]\nsteps = 5.0\n", "training.steps = 5.0: must be a whole number"),
        ("[training]\nvarlen = 1\n", "training.varlen = 1: must be true or false"),
        ("[job]\ndescription = 5\n", "job.description = 5: must be text"),
        ("[job]\ndescription = 1979-05-27\n", "job.description = 1979-05-27: must be text"),
        ("[training]\ndata_files = [1]\n", "training.data_files = [1]: must be a comma-separated list"),
        ("[training.data]\nsteps = 5\n", "no such option"),
        ("[zzz]\nsteps = 5\n", "[zzz]: no such section; the sections are job, model"),
    ],
)
def test_faults_in_toml(text, fault, write_toml):
    path = write_toml(text)
    (found,) = faults_of(*JOB, "--job.config_file", path)
    assert found.startswith(f"{path}: ")
    assert fault in found


def test_toml_takes_whole_numbers_for_fractions_and_text_for_lists(write_toml):
    path = write_toml('[optimizer]\nlr = 1\n[checkpoint]\nexclude_from_loading = "a, b"\n')
    config = parse("--job.config_file", path)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.checkpoint.exclude_from_loading == ["a", "b"]


def test_missing_job_file_names_those_nearby(tmp_path):
    (tmp_path / "small.toml").touch()
    (fault,) = faults_of("--job.config_file", str(tmp_path / "smal.toml"))
    assert fault.endswith(f'smal.toml": no such file; did you mean {tmp_path / "small.toml"}?')


def test_missing_shipped_job_file_names_it_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (fault,) = faults_of("--job.config_file", "configs/debg.toml")
    assert fault.endswith("no such file; did you mean configs/debug.toml?")


def test_shipped_job_file_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("--job.config_file", "flame/models/fla.toml").job.config_file == "flame/models/fla.toml"


def other_value(name):
    """A value of the option's type that is not its default."""
    option = names.options()[name]
    kind = names.kind_of(name)
    if kind == "bool":
        return not option.default
    return {
        "int": 12345,
        "float": 0.125,
        "auto": "true",
        "int or auto": "auto",
        "str": 'é "quoted" \\ tab\t line\n del\x7f \U0001f525',
        "list[str]": ["a,b", "c d", ""],
        "list[float]": [0.5, 1e-30],
    }[kind]


@pytest.mark.parametrize("name", [name for name in names.options() if name != "job.config_file"])
def test_every_option_survives_the_resolved_file(name, write_toml):
    config = parse_args([], check=False)
    section, _, key = name.partition(".")
    setattr(getattr(config, section), key, other_value(name))
    resolve_defaults(config)
    reloaded = parse_args(["--job.config_file", write_toml(to_toml(config))], check=False)
    assert reloaded == config


def test_the_resolved_file_of_a_job_is_a_job(write_toml):
    config = parse("--lr_scheduler.decay_type", "wsd", "--training.seq_len", "512", "--training.max_norm", "inf")
    assert parse_args(["--job.config_file", write_toml(to_toml(config))]) == config


def test_running_the_module_prints_the_resolved_job(capsys, write_toml):
    assert main(JOB) == 0
    assert parse_args(["--job.config_file", write_toml(capsys.readouterr().out)]) == parse()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.add_eos"], "true"),
        (["--training.no-add_eos"], "false"),
        (["--training.add_eos", "True"], "true"),
        (["--training.add_eos=auto"], "auto"),
    ],
)
def test_a_switch_that_may_be_auto(words, expected):
    assert parse_args(words, check=False).training.add_eos == expected


@pytest.mark.parametrize("written", ["4", "auto", "Auto"])
def test_a_number_may_be_a_word(written, write_toml):
    expected = 4 if written == "4" else "auto"
    assert parse(f"--training.batch_size={written}").training.batch_size == expected
    text = f"[training]\nbatch_size = {expected!r}\n"
    assert parse("--job.config_file", write_toml(text)).training.batch_size == expected


@pytest.mark.parametrize("written", ["most", "4.5", "true"])
def test_a_number_may_be_no_other_word(written, write_toml):
    with pytest.raises(ConfigError, match=f'batch_size = "{written}": must be a whole number or auto'):
        parse("--training.batch_size", written)
    toml = f'"{written}"' if written == "most" else written
    with pytest.raises(ConfigError, match="must be a whole number or auto"):
        parse("--job.config_file", write_toml(f"[training]\nbatch_size = {toml}\n"))


@pytest.mark.parametrize(("written", "expected"), [("true", "true"), ("false", "false"), ('"auto"', "auto")])
def test_a_switch_that_may_be_auto_in_a_job_file(written, expected, write_toml):
    path = write_toml(f"[training]\nadd_bos = {written}\n")
    assert parse_args(["--job.config_file", str(path)], check=False).training.add_bos == expected
