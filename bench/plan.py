"""`python -m gemini plan`, by its name in a clone."""

import sys

from gemini.train.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
