"""`python -m grupo` is `grupo`."""

import sys

from grupo.cli import main

sys.exit(main())
