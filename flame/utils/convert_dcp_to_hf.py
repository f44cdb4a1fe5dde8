"""``python -m flame.utils.convert_dcp_to_hf --path RUN``: a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import argparse
import sys

from flame.utils.conversion import add_common, run_conversion


def main(argv: list[str] | None = None) -> int:
    """Convert as the arguments say; the exit code is 0, or 2 when the user must change something."""
    parser = argparse.ArgumentParser(
        prog="python -m flame.utils.convert_dcp_to_hf",
        description="Write the weights of a checkpoint as a Hugging Face model folder, tokenizer included.",
    )
    parser.add_argument("--path", required=True, help="run folder, its checkpoint folder, or one step-N folder")
    parser.add_argument("--step", type=int, default=-1, help="step to convert (default: the newest complete one)")
    parser.add_argument("--config", help="model config, *.json or a folder (default: the run's model_config.json)")
    parser.add_argument("--tokenizer", help="tokenizer folder or hub name (default: the run's tokenizer/)")
    parser.add_argument("--output", help="folder to write to (default: the run folder)")
    parser.add_argument(
        "--export_dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the weights (default: the run's checkpoint.export_dtype, else as they are)",
    )
    parser.add_argument("--max_shard_size", default="5GB", help="size of one weight file at most (default: 5GB)")
    add_common(parser)
    args = parser.parse_args(argv)

    def convert(on_bytes):
        from flame.checkpoint.to_hf import convert_dcp_to_hf

        return convert_dcp_to_hf(
            args.path,
            step=args.step,
            config=args.config,
            tokenizer=args.tokenizer,
            output=args.output,
            export_dtype=args.export_dtype,
            max_shard_size=args.max_shard_size,
            on_bytes=on_bytes,
        )

    return run_conversion(convert, args.quiet, args.custom_models)


if __name__ == "__main__":
    sys.exit(main())
