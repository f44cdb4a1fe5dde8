"""What a run folder says of its run."""

import os

from transformers import LlamaConfig

from flame.cli.parse import parse_args
from flame.data.tokenize import load_tokenizer
from flame.training.announce import write_run_folder


def test_a_crash_leaves_the_old_job_file_or_the_new_one(tmp_path):
    config, tokenizer = parse_args(["--job.config_file=configs/debug.toml"]), load_tokenizer("configs/tokenizer")
    config.job.dump_folder = str(tmp_path)
    job_file, old = tmp_path / "config.toml", tmp_path / "old.toml"
    job_file.write_text("old")
    os.link(job_file, old)
    write_run_folder(config, LlamaConfig(), tokenizer, world_size=2)
    assert old.read_text() == "old", "the new one was written into it"
    kept = parse_args(["--job.config_file", str(job_file)])
    assert kept == config
