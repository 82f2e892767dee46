"""``python -m gradtrace``: the same as the ``gradtrace`` command."""

import sys

from gradtrace_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
