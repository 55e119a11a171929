"""`python -m mla_fusion.cli`, where the command `mla-fusion` is not on the path."""

import sys

from mla_fusion.cli import main

sys.exit(main())
