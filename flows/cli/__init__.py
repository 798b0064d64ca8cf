"""The command line."""

from flows.cli.app import main as main
