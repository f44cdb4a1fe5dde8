"""How the stages and micro-batches of a pipeline are cut."""

from __future__ import annotations

from flame.config import JobConfig
from flame.parallel.pipeline_cut import data_config


def test_a_pipeline_takes_its_microbatches_one_by_one():
    config = JobConfig()
    config.training.batch_size, config.training.gradient_accumulation_steps = 2, 4
    assert data_config(config) is config
    config.experimental.pipeline_parallel_degree = 2
    assert (data_config(config).training.batch_size, data_config(config).training.gradient_accumulation_steps) == (1, 8)
    config.experimental.pipeline_parallel_microbatches = 2
    assert (data_config(config).training.batch_size, data_config(config).training.gradient_accumulation_steps) == (4, 2)
