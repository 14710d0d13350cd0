"""``python -m jaxfold``."""

import sys

from jaxfold._cli import main

sys.exit(main())
