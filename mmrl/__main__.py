"""``python -m mmrl`` is ``mmrl``."""

import sys

from mmrl.commands.cli import main

sys.exit(main())
