"""The command line, ``liveset``; its help lists the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors of the library become one line on stderr and exit code 1."""
    from liveset.cli.app import app
    from liveset.cli.usage import reworded
    from liveset.errors import CommitInterrupted, DatasetError

    try:
        app(list(sys.argv[1:] if argv is None else argv), prog_name="liveset")
    except DatasetError as error:
        sys.exit(f"liveset: {reworded(str(error)).splitlines()[0] if str(error) else type(error).__name__}")
    except BrokenPipeError:
        _stop_quietly()
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):  # typer has made an error of it
            _stop_quietly()
        if done.__context__ is not None and isinstance(ended := done.__context__.__context__, CommitInterrupted):  # the same
            print(f"liveset: {reworded(str(ended))}", file=sys.stderr)
        raise
    except (OSError, UnicodeEncodeError) as error:
        # A full disk behind a redirection, a terminal that cannot show the text, a working directory that is gone
        name = getattr(error, "filename", None)
        sys.exit(f"liveset: {f'{name}: {error.strerror}' if isinstance(error, OSError) and name is not None else error}")


def _stop_quietly() -> NoReturn:
    """The reader of our output has seen enough (``liveset head ... | head -1``): end as other tools do, which the signal kills."""
    # Python must not complain again while it shuts down
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + 13)
