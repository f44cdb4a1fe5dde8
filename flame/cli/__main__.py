"""``python -m flame.cli``: the help, or a check of a job."""

import sys

from flame.cli.parse import main

sys.exit(main(sys.argv[1:]))
