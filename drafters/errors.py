"""The one kind of error that a user can act on, and how entry points print it."""

import errno
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn


class UserError(ValueError):
    """A mistake in a recipe, a file or a command: says key, value, what is allowed and the remedy."""


def cli(main: Callable[[], int | None]) -> Callable[[], NoReturn]:
    """Wraps an entry point so that it ends with an exit status and never with a traceback for a user's mistake.

    Args:
        main: the entry point; what it returns is the exit status (None is 0).

    Returns:
        A function that runs `main` and exits: 2 after a `UserError` or a file that can't be used (printed as
        `error: ...`), 130 when interrupted.
    """

    @wraps(main)
    def run() -> NoReturn:
        try:
            status = main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:
            if error.filename is None and error.errno != errno.ENOSPC:
                raise  # not about a file or a full disk: that is ours to fix, so show where
            place = "" if error.filename is None else f": {error.filename}"
            print(f"error: {error.strerror}{place}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted; run the same command to continue", file=sys.stderr)
            sys.exit(130)
        sys.exit(status)

    return run
