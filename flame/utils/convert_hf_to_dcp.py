"""``python -m flame.utils.convert_hf_to_dcp --model HF --checkpoint RUN/checkpoint/step-0``: given weights."""

from __future__ import annotations

import argparse
import sys

from flame.utils.conversion import add_common, run_conversion


def main(argv: list[str] | None = None) -> int:
    """Convert as the arguments say; the exit code is 0, or 2 when the user must change something."""
    parser = argparse.ArgumentParser(
        prog="python -m flame.utils.convert_hf_to_dcp",
        description="Write the weights of a Hugging Face model as a checkpoint that training starts from.",
    )
    parser.add_argument("--model", required=True, help="Hugging Face model folder")
    parser.add_argument("--checkpoint", required=True, help="checkpoint to make, such as exp/run/checkpoint/step-0")
    add_common(parser)
    args = parser.parse_args(argv)

    def convert(on_bytes):
        from flame.checkpoint.from_hf import convert_hf_to_dcp

        return convert_hf_to_dcp(args.model, args.checkpoint, on_bytes=on_bytes)

    return run_conversion(convert, args.quiet, args.custom_models)


if __name__ == "__main__":
    sys.exit(main())
