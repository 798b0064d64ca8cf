"""Errors of this project in Prefect's log: their messages, without the frames of the code that raised them."""

import logging

from cosmos_rl_core.errors import CosmosRLError, visible

LOGGERS = ("prefect.flow_runs", "prefect.engine")
"""Loggers of Prefect that log the error in the final state of a flow run, at the end of its process."""


def log_messages_only() -> None:
    """Let Prefect log the message of an error of this project in place of its traceback. A second call does nothing."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_shortened)


def _shortened(record: logging.LogRecord) -> bool:
    """Shorten a line that has such an error. Returns True: the line is kept."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, CosmosRLError):
        record.msg, record.args, record.exc_info, record.exc_text = visible(str(error)), (), None, None
    return True
