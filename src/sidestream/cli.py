"""The console script. Each command has a parser with a function `run`, which returns the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DEMO_NEEDS = ("rich", "numpy", "PIL", "sklearn")
BAD_INPUT = 2  # the exit code that argparse uses as well
INTERRUPTED = 130  # what a shell shows for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; `None` takes those of the process.

    Returns:
        The exit code: 0, 2 for input that cannot be used, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C", INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sidestream", description="Keep an accelerator fed from DataPipes.")
    _add_demo(parser.add_subparsers(title="commands", metavar="COMMAND", required=True))
    return parser


def _add_demo(commands: Any) -> None:
    about = "train a small network on images, with the two stages and without, and compare"
    demo = commands.add_parser("demo", help=about, description=about.capitalize() + ".")
    demo.set_defaults(run=_run_demo)
    demo.add_argument(
        "--epochs", type=_positive, default=12, help="with the two stages [epochs] (default: %(default)s)"
    )
    demo.add_argument("--batch-size", type=_positive, default=32, help="images in a batch (default: %(default)s)")
    demo.add_argument("--device", help="where to train, such as cuda or cpu (default: cuda where there is one)")
    demo.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder with one sub-folder of images for each class (default: handwritten digits)",
    )


def _run_demo(arguments: argparse.Namespace) -> int:
    missing = [name for name in DEMO_NEEDS if find_spec(name) is None]
    if missing:
        return _fail(f"the demo needs {', '.join(missing)}: pip install 'sidestream[demo]'")
    from sidestream import demo  # here, since it imports what only its extra installs

    try:
        demo.run(arguments.epochs, arguments.batch_size, arguments.device, arguments.data)
    except demo.DemoError as error:
        return _fail(str(error))
    return 0


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _fail(message: str, code: int = BAD_INPUT) -> int:
    sys.stderr.write(f"sidestream: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
