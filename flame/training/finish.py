"""The end of a run: the model in Hugging Face format, a loss curve, and a sample from the reloaded model."""

from __future__ import annotations

import logging

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from flame.checkpoint.to_hf import convert_dcp_to_hf
from flame.config import JobConfig
from flame.errors import UserError
from flame.metrics.report import write_report
from flame.training.run import Run

logger = logging.getLogger(__name__)


def finish_run(run: Run, again: bool = False) -> None:
    """Export the last checkpoint, draw the loss curve and print a sample, on the main rank while the others wait.

    Args:
        again: nothing was trained; what an earlier end of the run left is made only where it is missing.
    """
    if run.dist.is_main and not (again and is_exported(run)):
        if run.config.checkpoint.export_hf:
            export(run)
        logger.info("%s", write_report([run.dump_folder]))
    run.dist.long_barrier()


def check_finish(config: JobConfig, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse, before anything is trained, what could not be done at the run's end.

    Raises:
        UserError: a prompt without tokens; a model with its own code, which the run folder does not keep.
    """
    job = config.job
    if job.sample_prompt and not tokenizer(job.sample_prompt).input_ids:
        raise UserError(f"job.sample_prompt = {job.sample_prompt!r}: the tokenizer makes no token of it")
    if config.checkpoint.export_hf and config.model.trust_remote_code and getattr(model_config, "auto_map", None):
        raise UserError(
            "checkpoint.export_hf: a model that brings its own Python code (model.trust_remote_code) cannot be "
            "exported in this version; set --checkpoint.no-export_hf"
        )


def is_exported(run: Run) -> bool:
    """Whether the run folder holds a model that was written after the run's last checkpoint."""
    exported = run.dump_folder / "config.json"
    checkpoint = run.dump_folder / run.config.checkpoint.folder / f"step-{run.step}"
    return exported.exists() and exported.stat().st_mtime >= checkpoint.stat().st_mtime


def export(run: Run) -> None:
    """Write the newest checkpoint to the run folder's root in Hugging Face format, and sample from it if asked to."""
    if run.saves is None:
        logger.warning("no model in Hugging Face format: it is made from a checkpoint, and checkpoints are turned off")
        return
    section = run.config.checkpoint
    convert_dcp_to_hf(run.dump_folder / section.folder, step=run.saves.saved_step, output=run.dump_folder)
    if run.config.job.sample_prompt:
        logger.info("a sample of the reloaded model:\n%s", sample(run))


@torch.no_grad()
def sample(run: Run) -> str:
    """Reload the exported folder and continue ``job.sample_prompt``, each token drawn from the 40 likeliest."""
    job = run.config.job
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(run.dump_folder)
    model = AutoModelForCausalLM.from_pretrained(run.dump_folder).to(run.dist.device).eval()
    input_ids = tokenizer(job.sample_prompt, return_tensors="pt").input_ids.to(run.dist.device)  # [1, T]
    torch.manual_seed(run.config.training.seed)
    output = model.generate(
        input_ids, max_new_tokens=job.sample_tokens, do_sample=True, temperature=0.8, top_k=40, pad_token_id=0
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)
