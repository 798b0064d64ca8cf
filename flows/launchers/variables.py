"""Environment variables that stages need wherever they run. Values are never written to a file."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

PASSED = (
    "AWS_*",
    "PROD_S3_CHECKPOINT_*",
    "COSMOS_RL_S3_PROFILES",
    "COSMOS_RL_CACHE_*",
    "REMOTE_REWARD_*",
    "DIFFUSION_REWARD_*",
    "WFM_REWARD_*",
    "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA",
    "CAPTION_*",
    "OPENAI_*",
    "WANDB_*",
    "HF_*",
)
"""Addresses and credentials of the store, of services and of the model hub, and settings of caches."""
OF_THE_POD = ("AWS_ROLE_*", "AWS_WEB_IDENTITY_*", "AWS_CONTAINER_*")
"""Variables that a cluster gives each pod for its service account; another pod's would be wrong."""
SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIALS")


def passed(environment: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the variables of :data:`PASSED` that are set."""
    return sorted(name for name in environment if _is_one_of(name, PASSED))


def plain(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of :data:`PASSED` for other machines: no pod's own, and no secrets by name or in a URL."""
    open_ = [name for name in passed(environment) if not SECRET.search(name)]
    mine = [name for name in open_ if not _is_one_of(name, OF_THE_POD)]
    return {name: environment[name] for name in mine if not _may_hold_a_secret(environment[name])}


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _may_hold_a_secret(value: str) -> bool:
    if "://" not in value:
        return False
    return "@" in urlsplit(value).netloc or "?" in value
