"""Run the command line: ``python -m flows``."""

from flows.cli import main

main()
