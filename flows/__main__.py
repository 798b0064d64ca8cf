"""Run the command line: ``python -m flows``."""

from flows.cli.app import main

main()
