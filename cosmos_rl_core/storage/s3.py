"""Access to S3: credentials by URL, one request an operation, large objects in parts, retries for a limited time.

Built on s3fs, but without three of its habits: it lists when an object is not found, it caches listings, and it retries
a fixed number of times. Secrets come only from the environment and from AWS's own files.
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
"""Environment variable: the AWS profile by URL, ``s3://bucket/prefix=profile,...``; the longest prefix wins."""
CHECKPOINT = "PROD_S3_CHECKPOINT_"
"""Prefix of cosmos-rl's variables; if set, they apply to all URLs without a profile."""
RETRY_FOR_S = 60.0
"""Seconds for which an operation is retried if its failure may be temporary."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 8.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 30
PART_BYTES = 2**23
"""Bytes of a part. Objects are read in parts; objects of at least two parts are also written in parts."""
PARTS_AT_ONCE = 8

_PASSING_CODES = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException"}
_PASSING_CODES |= {"TooManyRequestsException", "RequestLimitExceeded", "OperationAborted"}
_PASSING_CODES |= {"ConditionalRequestConflict"}
_PASSING = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    exceptions.FlexibleChecksumError,
    # A service or command that gives keys did not give them just now; wrong keys are refused by the server.
    exceptions.CredentialRetrievalError,
    exceptions.MetadataRetrievalError,
    ResponseParserError,
    aiohttp.ClientError,
    TimeoutError,
    ConnectionError,
)
_SOURCES = f"keys and endpoint come from {PROFILES}, {CHECKPOINT}* or AWS's own variables and files, in this order"
_RIGHTS = "the keys may be wrong or lack a right: s3:GetObject, s3:PutObject, s3:ListBucket (to see what is absent)"
CLOCK = "RequestTimeTooSkewed"
_HINTS = {
    "NoSuchBucket": "make the bucket first, or name another",
    "InvalidAccessKeyId": "the server does not know the access key; is the endpoint the right one?",
    "SignatureDoesNotMatch": "the secret key does not match the access key",
    "ExpiredToken": "the session token has expired; get another and run again",
    CLOCK: "this machine's clock is wrong; set it",
    "PermanentRedirect": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
}

Found = TypeVar("Found")


class Objects(S3FileSystem):
    """The file system of s3fs, for whole objects.

    Raises :class:`ConfigError` for mistakes that people must correct, ``FileNotFoundError`` for a missing object, and
    another ``OSError`` for failures that remain after ``RETRY_FOR_S`` seconds of retries.
    """

    # s3fs must not retry, because `_patiently` does.
    retries = 1

    async def _call_s3(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        """Send a request, with retries."""
        # super() does not work inside the lambda.
        call = super()._call_s3
        place = "/".join(str(kwargs[name]) for name in ("Bucket", "Key") if name in kwargs)
        return await _patiently(lambda: call(method, *akwarglist, **kwargs), f"s3://{place}")

    async def _info(self, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an object's size by one request. A prefix without an object counts as missing."""
        bucket, key, _version = self.split_path(path)
        found = await self._call_s3("head_object", Bucket=bucket, Key=key)
        about = {"size": found["ContentLength"], "type": "file", "ETag": found["ETag"]}
        return {"name": f"{bucket}/{key}"} | about

    async def _cat_file(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return the object, or its bytes from ``start`` up to ``end``; neither may be negative.

        The answer to the first part contains the object's size; the other parts are read in parallel.
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

        others = await asyncio.gather(*map(part, range(first_end, last, PART_BYTES)))
        return b"".join([data, *others])

    async def _part(self, path: str, begin: int, end: int) -> tuple[bytes, int, str]:
        """Return bytes ``begin`` to ``end`` of an object, with size and tag of the whole object."""
        bucket, key, _version = self.split_path(path)
        call = super()._call_s3

        async def read() -> tuple[bytes, int, str]:
            wanted = f"bytes={begin}-{end - 1}"
            found = await call("get_object", Bucket=bucket, Key=key, Range=wanted)
            async with found["Body"] as body:
                data = await body.read()
            if len(data) != found["ContentLength"]:
                raise ConnectionError(f"received {len(data)} of {found['ContentLength']} bytes")
            if "ContentRange" not in found:
                # Some servers ignore the range and send the whole object.
                return data[begin:end], len(data), found["ETag"]
            return data, int(found["ContentRange"].rpartition("/")[2]), found["ETag"]

        try:
            return await _patiently(read, f"s3://{bucket}/{key}")
        except OSError as error:
            # No range of an empty object is valid.
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
    """Return the file system for a URL, which all threads of this process share.

    A forked process gets a new one. It must not close the inherited one, because that would end the parent's
    connections. Raises :class:`ConfigError` for a URL without a bucket.
    """
    if not url.removeprefix("s3://").partition("/")[0]:
        raise ConfigError(f"{url} names no bucket; expected s3://bucket/prefix")
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
    """Return the options of s3fs for a URL; empty if only the standard AWS variables and files apply.

    The profile in ``COSMOS_RL_S3_PROFILES`` has precedence over cosmos-rl's variables, and these over AWS's own. Raises
    :class:`ConfigError` if only one of cosmos-rl's two keys is set, or if the profile does not exist.
    """
    profile = _profile(url, environment.get(PROFILES, ""))
    if profile is not None:
        return _of_profile(profile, environment.get("AWS_CONFIG_FILE"))
    names = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    names |= {"ENDPOINT_URL": "endpoint_url", "REGION_NAME": "region_name"}
    found = {option: environment.get(CHECKPOINT + name, "") for name, option in names.items()}
    if bool(found["key"]) != bool(found["secret"]):
        both = f"{CHECKPOINT}ACCESS_KEY_ID and {CHECKPOINT}SECRET_ACCESS_KEY"
        raise ConfigError(f"{both} come together; one is not set")
    return {option: value for option, value in found.items() if value}


def _profile(url: str, mapping: str) -> str | None:
    profiles: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in mapping.split(","))):
        prefix, equals, profile = entry.rpartition("=")
        if not (equals and profile and prefix.startswith("s3://")):
            expected = "s3://bucket/prefix=profile, separated by commas"
            raise ConfigError(f"{PROFILES} has {entry!r}; expected {expected}")
        profiles[prefix.rstrip("/")] = profile
    fitting = [prefix for prefix in profiles if f"{url}/".startswith(f"{prefix}/")]
    return profiles[max(fitting, key=len)] if fitting else None


@cache
def _of_profile(profile: str, _config_file: str | None) -> dict[str, str]:
    """Return a profile with its endpoint and region, because AWS's variables would override those two."""
    session = AioSession(profile=profile)
    try:
        written = session.get_scoped_config()
    except exceptions.ProfileNotFound as error:
        known = ", ".join(sorted(session.available_profiles)) or "none"
        found = f"the AWS profile {profile!r}, which does not exist"
        raise ConfigError(f"{PROFILES} names {found}; known: {known}") from error
    options = {"endpoint_url": written.get("endpoint_url"), "region_name": written.get("region")}
    given = {name: value for name, value in options.items() if value is not None}
    return {"profile": profile} | given


async def _patiently(call: Callable[[], Awaitable[Found]], url: str) -> Found:
    """Return the call's answer. Retry temporary failures after doubling waits; raise mistakes of people at once."""
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
        # Jitter keeps many processes from retrying at the same moment.
        await asyncio.sleep(delay_s * random.uniform(0.5, 1))
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


def _may_pass(error: Exception) -> bool:
    status, code = _answer(error)
    if status is not None:
        return status == 429 or (status >= 500 and status != 501) or code in _PASSING_CODES
    return isinstance(error, _PASSING)


def _mistake(error: Exception) -> str | None:
    """Return the mistake that a person must correct, with advice; None for other errors."""
    status, code = _answer(error)
    # Errors of botocore before a request: no credentials, no region, a bucket's name that cannot be.
    local = isinstance(error, exceptions.BotoCoreError) and not isinstance(error, _PASSING)
    if local or isinstance(error, ValueError):
        return f"{error}; {_SOURCES}"
    if status in {401, 403}:
        sources = "" if code == CLOCK else f"; {_SOURCES}"
        return f"the server refuses ({code}: {error}); {_HINTS.get(code, _RIGHTS)}{sources}"
    return f"{error}; {_HINTS[code]}" if code in _HINTS else None


def _answer(error: Exception) -> tuple[int | None, str]:
    """Return the server's HTTP status and error code; None and "" if it did not answer. HEAD gives no code.

    s3fs raises its own ``OSError``, whose cause is the error of botocore.
    """
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status, answer.get("Error", {}).get("Code", "")
