"""``python -m flame.utils.inspect_data --job.config_file … --steps N``: what the model will see.

The batches come from the loaders that training itself builds, one for each rank, so they are those of the run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from flame.cli.parse import parse_args
from flame.config import AUTO, JobConfig
from flame.errors import EXIT_USER_ERROR, UserError
from flame.utils.commands import INTERRUPTED, translate_flags

DESCRIPTION = """\
Print the training data of a job: packed sequences with decoded documents, boundaries and masked targets.
Besides the options below it takes those of training (--section.name, see `bash train.sh -h`)."""


def main(argv: list[str] | None = None) -> int:
    """Print as the arguments say; the exit code is 0, 2 when the user must change something, or 130 by Ctrl-C."""
    arguments, job_argv = build_parser().parse_known_args(argv)
    try:
        check_arguments(arguments)
        config = parse_args(job_argv)
        for line in inspect_job(config, arguments):
            print(line, flush=True)
    except UserError as error:
        print(translate_flags(str(error), {"checkpoint.load_step": "load_step"}), file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `… | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flame.utils.inspect_data", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=1, help="training steps to print (default: 1)")
    parser.add_argument("--dp_degree", type=int, default=1, help="data-parallel ranks of the job (default: 1)")
    parser.add_argument(
        "--hash",
        action="store_true",
        help="print one SHA-256 for each step and nothing else: what training.log_data_hash writes to metrics.jsonl",
    )
    parser.add_argument(
        "--load_step",
        type=int,
        help="begin behind this checkpoint of job.dump_folder, -1 for the newest (default: at the first step)",
    )
    parser.add_argument("--first_step", type=int, help="pass over the steps before this one (default: the next one)")
    parser.add_argument("--max_chars", type=int, default=100, help="text shown of each piece (default: 100)")
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises UserError for a number that is too small."""
    for name in ("steps", "dp_degree", "max_chars"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} {getattr(arguments, name)}: must be at least 1")


def inspect_job(config: JobConfig, arguments: argparse.Namespace) -> Iterator[str]:
    """The lines to print.

    Raises:
        UserError: the data, the tokenizer or the checkpoint cannot be used; the message says what to change.
    """
    if config.training.batch_size == AUTO:
        raise UserError("training.batch_size = auto: a run decides it; give a number, or the config.toml of its folder")

    from flame.data.tokenize import load_tokenizer
    from flame.utils.local_ranks import LocalRanks
    from flame.utils.show_batches import LEGEND

    done, data_state = 0, None
    if arguments.load_step is not None:
        done, data_state = read_data_state(config, arguments.load_step)
    config.training.log_data_hash = arguments.hash
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.trust_remote_code)
    ranks = LocalRanks(config, tokenizer, arguments.dp_degree, data_state)
    if not arguments.hash:
        yield LEGEND
    try:
        first = done + 1 if arguments.first_step is None else arguments.first_step
        if first <= done:
            raise UserError(f"--first_step {first}: --load_step begins behind step {done}; give an earlier checkpoint")
        for step in range(done + 1, first + arguments.steps):
            batches = ranks.next_step()
            if batches is None:
                print(f"training.max_epochs is over after step {step - 1}", file=sys.stderr)
                return
            if step < first:
                continue
            if arguments.hash:
                yield hash_step(batches)
            else:
                yield from describe_step(step, batches, ranks.epochs(), tokenizer, arguments.max_chars)
    finally:
        ranks.close()


def read_data_state(config: JobConfig, load_step: int) -> tuple[int, dict]:
    """The step of a checkpoint and the state of the data behind it.

    Raises:
        UserError: there is no such checkpoint, or it has no data state.
    """
    from pathlib import Path

    from flame.checkpoint.folders import choose_step, list_steps, step_folder
    from flame.checkpoint.manager import read_train_state

    root = Path(config.job.dump_folder) / config.checkpoint.folder
    listing = list_steps(root)
    step = choose_step(root, load_step, listing)
    if step is None:
        raise UserError(f"--load_step {load_step}: there is no checkpoint in {root}")
    state = read_train_state(step_folder(root, step), listing.complete[step])
    if "dataloader" not in state:
        raise UserError(f"--load_step {load_step}: {step_folder(root, step)} holds no state of the data")
    return step, state["dataloader"]


def hash_step(batches: list[list]) -> str:
    """One hash of a step's sequences in global order, from the microbatches of each rank."""
    from flame.data.batch import combine_digests

    digests: dict[int, bytes] = {}
    for batch in (batch for rank_batches in batches for batch in rank_batches):
        digests.update(zip(batch.numbers, batch.digests, strict=True))
    return combine_digests(digests)


def describe_step(step: int, batches: list[list], epochs: dict[str, float], tokenizer, max_chars: int) -> Iterator[str]:
    """Lines that show a step's sequences in global order."""
    from flame.utils.show_batches import show_sequence, split_sequences

    views = [
        (view, rank)
        for rank, rank_batches in enumerate(batches)
        for batch in rank_batches
        for view in split_sequences(batch)
    ]
    views.sort(key=lambda pair: pair[0].number)
    passes = ", ".join(f"{name} {count:.6f}" for name, count in epochs.items())
    yield f"step {step}: sequences {views[0][0].number} to {views[-1][0].number}; epochs after it: {passes}"
    for view, rank in views:
        yield from show_sequence(view, rank, tokenizer, max_chars)


if __name__ == "__main__":
    sys.exit(main())
