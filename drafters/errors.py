"""The one kind of error that a user can act on, and how entry points print it."""

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
        A function that runs `main` and exits: 2 after a `UserError` (printed as `error: ...`), 130 when interrupted.
    """

    @wraps(main)
    def run() -> NoReturn:
        try:
            status = main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted; run the same command to continue", file=sys.stderr)
            sys.exit(130)
        sys.exit(status)

    return run
