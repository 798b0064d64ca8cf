"""Objects of S3: whose keys for which URL, one request an operation, large ones in parts, and what is worth a retry.

Built on s3fs, of which three habits do not fit here: it lists where an object is not found, it remembers listings, and
it tries again a fixed number of times. Secrets come from the environment and AWS's own files alone.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import aiohttp
from aiobotocore.session import AioSession
from botocore import exceptions
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from cosmos_rl_core.errors import ConfigError

PROFILES = "COSMOS_RL_S3_PROFILES"
"""Environment variable: which AWS profile is for which URLs, ``s3://bucket/prefix=profile,...``; the longest wins."""
CHECKPOINT = "PROD_S3_CHECKPOINT_"
"""Prefix of cosmos-rl's variables; where they are set, they are for all URLs that have no profile."""
RETRY_FOR_S = 60.0
"""An operation that fails in a way that may pass is begun again for this long."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 8.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 30
PART_BYTES = 2**23
"""Objects are read in parts of this size, and written in such parts from twice the size on."""
PARTS_AT_ONCE = 8

_PASSING_CODES = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequestsException"}
_PASSING_CODES |= {"RequestLimitExceeded", "OperationAborted", "ConditionalRequestConflict"}
_PASSING = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    ResponseParserError,
    aiohttp.ClientError,
    TimeoutError,
    ConnectionError,
)
_MISTAKES = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.SSOError,
    exceptions.NoRegionError,
    exceptions.ParamValidationError,
    exceptions.InvalidRegionError,
)
_SOURCES = f"keys and endpoint come from {PROFILES}, {CHECKPOINT}* or AWS's own variables and files, in this order"
_RIGHTS = (
    "the keys may be wrong, or lack a right: s3:GetObject, s3:PutObject, s3:ListBucket (else what is absent is refused)"
)
_HINTS = {
    "NoSuchBucket": "make the bucket first, or name another",
    "InvalidAccessKeyId": "the access key is not known there; is the endpoint the right one?",
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "ExpiredToken": "the session token has expired; get another and run again",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "PermanentRedirect": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
}

Found = TypeVar("Found")


class Objects(S3FileSystem):
    """s3fs for whole objects.

    Raises :class:`ConfigError` for what only people can put right, ``FileNotFoundError`` for an object that is not
    there, another ``OSError`` for the rest, after trying again for ``RETRY_FOR_S``.
    """

    # Ours alone decides what is tried again, and for how long.
    retries = 1

    async def _call_s3(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        """One request, tried again while it may pass."""
        # Not inside the lambda, which has no first argument.
        call = super()._call_s3
        return await _patiently(lambda: call(method, *akwarglist, **kwargs), _url(kwargs))

    async def _info(self, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Size of one object, by one request; what is no object is not there."""
        bucket, key, _version = self.split_path(path)
        found = await self._call_s3("head_object", Bucket=bucket, Key=key)
        return {"name": f"{bucket}/{key}", "size": found["ContentLength"], "type": "file", "ETag": found["ETag"]}

    async def _cat_file(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """The object, or its bytes from ``start`` up to ``end``, neither of them negative.

        The answer to the first part says how many more there are; those come side by side.
        """
        begin = start or 0
        if end is not None and end <= begin:
            return b""
        first_end = begin + PART_BYTES if end is None else min(end, begin + PART_BYTES)
        data, size, etag = await self._part(path, begin, first_end)
        last = size if end is None else min(end, size)
        room = asyncio.Semaphore(PARTS_AT_ONCE)

        async def part(begin: int) -> bytes:
            async with room:
                found, _, found_etag = await self._part(path, begin, min(begin + PART_BYTES, last))
            if found_etag != etag:
                raise OSError(f"{path} was replaced while it was read")
            return found

        return b"".join([data, *await asyncio.gather(*map(part, range(first_end, last, PART_BYTES)))])

    async def _part(self, path: str, begin: int, end: int) -> tuple[bytes, int, str]:
        """Some of an object's bytes, and the whole object's size and tag."""
        bucket, key, _version = self.split_path(path)
        call = super()._call_s3

        async def read() -> tuple[bytes, int, str]:
            found = await call("get_object", Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}")
            async with found["Body"] as body:
                data = await body.read()
            if len(data) != found["ContentLength"]:
                raise ConnectionError(f"{len(data)} of {found['ContentLength']} bytes came")
            if "ContentRange" not in found:
                # Some servers answer with the whole object.
                return data[begin:end], len(data), found["ETag"]
            return data, int(found["ContentRange"].rpartition("/")[2]), found["ETag"]

        try:
            return await _patiently(read, f"s3://{bucket}/{key}")
        except OSError as error:
            # An empty object has no first byte.
            if _answer(error)[1] in {"InvalidRange", "416"}:
                return b"", begin, ""
            raise

    async def _pipe_file(self, path: str, data: bytes, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write an object whole; a large one in several parts at once."""
        return await super()._pipe_file(path, data, **{"chunksize": PART_BYTES, **options})

    async def _put_file(self, lpath: str, rpath: str, **_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write an object whole from a local file, like :meth:`_pipe_file`."""
        await super()._put_file(lpath, rpath, chunksize=PART_BYTES)


def filesystem(url: str) -> Objects:
    """The access that is for a URL: this process's, the same in all its threads.

    A fork gets one of its own. Its parent's is kept where it is: closed in the fork, it would end the parent's
    connections.
    """
    return _instance(os.getpid(), tuple(sorted(options_of(url, os.environ).items())))


@cache
def _instance(_pid: int, options: tuple[tuple[str, str], ...]) -> Objects:
    given: dict[str, Any] = dict(options)
    return Objects(
        client_kwargs={"region_name": given.pop("region_name", None)},
        max_concurrency=PARTS_AT_ONCE,
        **given,
        config_kwargs={
            "retries": {"total_max_attempts": 1},
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": 4 * PARTS_AT_ONCE,
        },
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def options_of(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What s3fs is to be told for a URL; empty where the standard AWS variables and files say everything.

    The profile that ``COSMOS_RL_S3_PROFILES`` names comes first, then cosmos-rl's variables, then AWS's own.
    """
    profile = _profile(url, environment.get(PROFILES, ""))
    if profile is not None:
        return _of_profile(profile, environment.get("AWS_CONFIG_FILE"))
    names = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    names |= {"ENDPOINT_URL": "endpoint_url", "REGION_NAME": "region_name"}
    found = {option: value for name, option in names.items() if (value := environment.get(CHECKPOINT + name))}
    if ("key" in found) != ("secret" in found):
        raise ConfigError(f"{CHECKPOINT}ACCESS_KEY_ID and {CHECKPOINT}SECRET_ACCESS_KEY come together; one is not set")
    return found


def _profile(url: str, mapping: str) -> str | None:
    profiles: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in mapping.split(","))):
        prefix, equals, profile = entry.rpartition("=")
        if not (equals and profile and prefix.startswith("s3://")):
            raise ConfigError(f"{PROFILES} has {entry!r}; expected s3://bucket/prefix=profile, separated by commas")
        profiles[prefix.rstrip("/")] = profile
    fitting = [prefix for prefix in profiles if f"{url}/".startswith(f"{prefix}/")]
    return profiles[max(fitting, key=len)] if fitting else None


@cache
def _of_profile(profile: str, _config_file: str | None) -> dict[str, str]:
    """A profile, and its endpoint and region: AWS's variables would come before those two."""
    session = AioSession(profile=profile)
    try:
        written = session.get_scoped_config()
    except exceptions.ProfileNotFound as error:
        known = ", ".join(sorted(session.available_profiles)) or "none"
        raise ConfigError(
            f"{PROFILES} names the AWS profile {profile!r}, which is not there; known: {known}"
        ) from error
    places = {"endpoint_url": "endpoint_url", "region": "region_name"}
    return {"profile": profile} | {option: written[name] for name, option in places.items() if name in written}


async def _patiently(call: Callable[[], Awaitable[Found]], url: str) -> Found:
    """The call's answer. What may pass is tried again, after waits that double; what is a mistake is said at once."""
    began_s, delay_s = time.monotonic(), FIRST_DELAY_S
    while True:
        try:
            return await call()
        except (OSError, ValueError, exceptions.BotoCoreError, *_PASSING) as error:
            if (mistake := _mistake(error)) is not None:
                raise ConfigError(f"{url}: {mistake}") from error
            if not _may_pass(error) or time.monotonic() + delay_s > began_s + RETRY_FOR_S:
                if isinstance(error, OSError):
                    raise
                raise OSError(str(error)) from error
        # Jitter, so that many processes do not come back at once.
        await asyncio.sleep(delay_s * random.uniform(0.5, 1))
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


def _may_pass(error: Exception) -> bool:
    status, code = _answer(error)
    if status is not None:
        return status == 429 or (status >= 500 and status != 501) or code in _PASSING_CODES
    return isinstance(error, _PASSING)


def _mistake(error: Exception) -> str | None:
    """What people have to put right, and how; None where it is no mistake of theirs."""
    status, code = _answer(error)
    if isinstance(error, (*_MISTAKES, ValueError)):
        return f"{error}; {_SOURCES}"
    if status in {401, 403}:
        return f"the server refuses ({code}: {error}); {_HINTS.get(code, _RIGHTS)}; {_SOURCES}"
    return f"{error}; {_HINTS[code]}" if code in _HINTS else None


def _answer(error: Exception) -> tuple[int | None, str]:
    """Return the server's HTTP status and error code; None and "" if it did not answer. A HEAD has the status alone.

    S3fs raises an ``OSError`` of its own, whose cause is botocore's error.
    """
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    return answer.get("ResponseMetadata", {}).get("HTTPStatusCode"), answer.get("Error", {}).get("Code", "")


def _url(kwargs: Mapping[str, Any]) -> str:
    return "/".join(["s3:/", *(str(kwargs[name]) for name in ("Bucket", "Key") if name in kwargs)])
