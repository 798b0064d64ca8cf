"""S3 as the store: on SeaweedFS what a real server decides, on moto behind a proxy what goes wrong on the way."""

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from cosmos_rl_core.errors import ConfigError, LeaseError, UnavailableError
from cosmos_rl_core.storage import s3, store
from cosmos_rl_core.storage.lease import KIND, Lease
from cosmos_rl_core.storage.sealed import seal
from tests import faulty_proxy
from tests.faulty_proxy import FaultyProxy
from tests.seaweed import BUCKET, READER, SeaweedFS

pytestmark = pytest.mark.processes


@pytest.fixture
def url(seaweed: SeaweedFS) -> str:
    """A place of its own on the real server."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def shared_proxy(s3_url: str) -> Iterator[FaultyProxy]:
    """One for all tests, as each address costs the making of a client."""
    with faulty_proxy.faulty_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    """A proxy between this test and moto."""
    monkeypatch.setenv("PROD_S3_CHECKPOINT_ENDPOINT_URL", shared_proxy.endpoint)
    shared_proxy.reset()
    return shared_proxy


@pytest.fixture
def far_url(s3_url: str, proxy: FaultyProxy) -> str:
    """A place of its own behind the proxy."""
    return f"{s3_url}/{secrets.token_hex(8)}"


def head(seaweed: SeaweedFS, url: str) -> dict[str, Any]:
    """What the server says of an object, by another client."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return seaweed.client().head_object(Bucket=bucket, Key=key)


# What a real server decides.


def test_large_objects_go_and_come_in_parts_and_any_range_of_them_can_be_read(seaweed, url):
    data = os.urandom(3 * s3.PART_BYTES + 12345)
    store.write(f"{url}/large", data)
    assert store.size(f"{url}/large") == len(data)
    assert store.read(f"{url}/large") == data
    # A tag of several parts ends with their number.
    assert head(seaweed, f"{url}/large")["ETag"].endswith('-4"')
    over_a_seam = (s3.PART_BYTES - 3, s3.PART_BYTES + 5)
    across_parts = (100, 2 * s3.PART_BYTES + 100)
    behind_the_end = (len(data) - 7, len(data) + 7)
    for start, end in (over_a_seam, across_parts, behind_the_end):
        assert store.read(f"{url}/large", start, end) == data[start:end]


def test_objects_may_be_empty_small_or_replaced_and_their_size_is_current(url):
    for data in (b"", b"first", b"the second", b""):
        store.write(f"{url}/object", data)
        assert (store.size(f"{url}/object"), store.read(f"{url}/object")) == (len(data), data)
    store.remove(f"{url}/object")
    store.remove(f"{url}/object")
    assert (store.size(f"{url}/object"), store.read_if_exists(f"{url}/object")) == (None, None)


def test_a_prefix_of_others_is_no_object(url):
    store.write(f"{url}/folder/object", b"1")
    assert (store.size(f"{url}/folder"), store.read_if_exists(f"{url}/folder")) == (None, None)
    assert store.put_if_absent(f"{url}/folder/other", b"2")


def test_many_objects_are_asked_for_at_once_and_answered_in_order(url):
    names = [f"{url}/{number}" for number in range(20)]
    for number, name in enumerate(names):
        store.write(name, b"x" * number)
    assert store.sizes([*names, f"{url}/none"]) == [*range(20), None]
    assert [data for _, data in store.ahead(names, store.read)] == [b"x" * number for number in range(20)]


def test_a_stream_has_the_bytes_of_the_object(url):
    data = os.urandom(2 * store.STREAMED_BYTES + 1)
    store.write(f"{url}/object", data)
    with store.stream(f"{url}/object") as file:
        assert file.read(10) + file.read() == data


def test_a_fork_has_a_connection_of_its_own_and_its_parent_keeps_the_old_one(url):
    store.write(f"{url}/object", b"1")
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            right = False
            try:
                right = store.read(f"{url}/object") == b"1" and store.put_if_absent(f"{url}/{os.getpid()}", b"mine")
            finally:
                os._exit(0 if right else 1)
        assert store.read(f"{url}/object") == b"1"
        assert os.waitpid(pid, 0)[1] == 0
        assert store.read(f"{url}/{pid}") == b"mine"


# Whose keys, and what is wrong with them.


@pytest.mark.parametrize(
    ("bucket", "variables", "said"),
    [
        (BUCKET, {"SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch.*does not match the access key"),
        (BUCKET, {"ACCESS_KEY_ID": "nobody"}, "InvalidAccessKeyId.*is the endpoint the right one"),
        ("none", {}, "s3://none/.*bucket does not exist; make the bucket first"),
        ("Not_a_bucket!", {}, "Invalid bucket name"),
    ],
)
def test_errors_that_only_people_can_put_right_are_raised_at_once(seaweed, monkeypatch, bucket, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(s3.CHECKPOINT + name, value)
    began_s = time.monotonic()
    for access in (store.check_readable, store.check_writable, lambda url: store.put_if_absent(f"{url}/x", b"1")):
        with pytest.raises(ConfigError, match=said) as error:
            access(f"s3://{bucket}/prefix")
        assert seaweed.secret not in str(error.value)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("root", ["s3://", "s3:///", "s3:///prefix"])
def test_a_store_without_a_bucket_is_refused_and_is_no_local_folder(tmp_path: Path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    for access in (store.check_readable, store.check_writable, lambda url: store.stamps(store.join(url, "x"))):
        with pytest.raises(ConfigError, match="names no bucket; expected s3://bucket/prefix"):
            access(root)
    assert [*tmp_path.iterdir()] == []
    assert store.join("s3://bucket//", "a", "b") == "s3://bucket/a/b"


def test_keys_that_may_only_read_are_told_so_when_something_is_to_be_written(url, monkeypatch):
    store.write(f"{url}/object", b"1")
    monkeypatch.setenv(f"{s3.CHECKPOINT}ACCESS_KEY_ID", READER)
    store.check_readable(url)
    assert store.read(f"{url}/object") == b"1"
    for access in (store.check_writable, lambda url: store.put_if_absent(f"{url}/new", b"1")):
        with pytest.raises(ConfigError, match=r"AccessDenied.*s3:PutObject"):
            access(url)


def test_a_lease_outlives_keys_that_are_refused_for_a_while(url, monkeypatch):
    """As a session token's, until there is another: its holder must go on to ask whether it has lost the lease."""
    with Lease(url, beat_s=0.05) as lease:
        monkeypatch.setenv(f"{s3.CHECKPOINT}ACCESS_KEY_ID", READER)
        time.sleep(0.5)
        before = store.read(f"{url}/1.count")
        monkeypatch.setenv(f"{s3.CHECKPOINT}ACCESS_KEY_ID", "tests")
        time.sleep(1)
        assert store.read(f"{url}/1.count") != before
        lease.check()
        assert store.put_if_absent(f"{url}/2.json", seal(KIND, {"pid": 4, "host": "node-7"}))
        time.sleep(1)
        with pytest.raises(LeaseError, match="pid 4 on node-7"):
            lease.check()


def test_missing_keys_are_a_mistake_too(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(f"{s3.CHECKPOINT}ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="Unable to locate credentials"):
        store.check_readable("s3://bucket/prefix")


def test_a_command_that_gives_no_keys_just_now_is_no_mistake_of_people(tmp_path: Path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text("[default]\ncredential_process = false\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv(f"{s3.CHECKPOINT}ENDPOINT_URL", "http://127.0.0.1:9/keys")
    monkeypatch.setattr(s3, "RETRY_FOR_S", 0.5)
    with pytest.raises(UnavailableError, match="Error when retrieving credentials"):
        store.check_readable("s3://bucket/prefix")


def test_each_prefix_may_have_a_profile_and_with_it_an_endpoint_of_its_own(seaweed, url, s3_url, tmp_path, monkeypatch):
    (tmp_path / "config").write_text(
        f"[profile theirs]\nendpoint_url = {os.environ['AWS_ENDPOINT_URL']}\nregion = eu-west-3\n"
        "aws_access_key_id = test\naws_secret_access_key = test\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv(s3.PROFILES, f"{s3_url}/base=theirs")
    store.write(f"{s3_url}/base/object", b"theirs")
    store.write(f"{url}/object", b"ours")
    assert head(seaweed, f"{url}/object")["ContentLength"] == 4
    # The same bucket, but not that prefix: cosmos-rl's variables say where it is, and there it is not.
    with pytest.raises(ConfigError, match="does not exist"):
        store.read(f"{s3_url}/based/object")
    assert s3.options_of(f"{s3_url}/base/object", os.environ)["region_name"] == "eu-west-3"

    monkeypatch.setenv(s3.PROFILES, f"s3://{BUCKET}=nobodys")
    with pytest.raises(ConfigError, match=r"'nobodys', which does not exist; known: theirs"):
        store.read(f"{url}/object")


def test_profiles_precede_cosmos_variables_which_precede_variables_of_aws(tmp_path: Path, monkeypatch):
    (tmp_path / "config").write_text("[profile a]\nendpoint_url = http://a\n[profile b]\nregion = b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    variables = {f"{s3.CHECKPOINT}{name}": name for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    profiles = {s3.PROFILES: "s3://bucket/deep=b, s3://bucket=a"}
    upstream = {"key": "ACCESS_KEY_ID", "secret": "SECRET_ACCESS_KEY"}
    assert s3.options_of("s3://bucket/x", {}) == {}
    assert s3.options_of("s3://bucket/x", variables) == upstream
    assert s3.options_of("s3://bucket/x", variables | profiles) == {"profile": "a", "endpoint_url": "http://a"}
    assert s3.options_of("s3://bucket/deep/x", variables | profiles) == {"profile": "b", "region_name": "b"}
    assert s3.options_of("s3://bucket-2/x", variables | profiles) == upstream
    with pytest.raises(ConfigError, match="come together"):
        s3.options_of("s3://bucket", {f"{s3.CHECKPOINT}ACCESS_KEY_ID": "alone"})
    with pytest.raises(ConfigError, match="'bucket=a'; expected s3://"):
        s3.options_of("s3://bucket", {s3.PROFILES: "bucket=a"})


# What goes wrong on the way.


@pytest.mark.parametrize("fault", [faulty_proxy.unavailable, faulty_proxy.cut, faulty_proxy.lost])
def test_requests_that_fail_on_the_way_are_tried_again(proxy, far_url, fault):
    data = os.urandom(1000)
    store.write(f"{far_url}/object", data)
    proxy.asked.clear()
    proxy.faults = [fault, fault]
    assert store.read(f"{far_url}/object") == data
    assert proxy.asked == ["GET"] * 3
    if fault is not faulty_proxy.cut:
        proxy.faults = [fault, fault]
        store.write(f"{far_url}/other", data)
        proxy.faults = [fault]
        assert store.size(f"{far_url}/other") == 1000


def test_a_write_whose_answer_was_lost_is_still_ours(proxy, far_url):
    proxy.faults = [faulty_proxy.Exchange.pass_on, faulty_proxy.lost]
    assert store.put_if_absent(f"{far_url}/object", b"ours")
    assert proxy.asked[:3] == ["GET", "PUT", "PUT"]
    assert not store.put_if_absent(f"{far_url}/object", b"theirs")


def test_a_server_that_stays_away_is_unavailable_after_its_time(proxy, far_url, monkeypatch):
    monkeypatch.setattr(s3, "RETRY_FOR_S", 2.0)
    proxy.always = faulty_proxy.unavailable
    began_s = time.monotonic()
    with pytest.raises(UnavailableError, match="reduce your request rate") as error:
        store.write(f"{far_url}/object", b"1")
    assert error.value.retryable
    assert len(proxy.asked) > 2
    assert time.monotonic() - began_s < 10


def test_a_missing_answer_is_not_waited_for_for_ever(proxy, far_url, monkeypatch):
    store.write(f"{far_url}/object", b"1")
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.3)
    # Keys of its own, so that the access is made anew.
    monkeypatch.setenv(f"{s3.CHECKPOINT}REGION_NAME", "us-east-1")
    proxy.faults = [faulty_proxy.silent]
    assert store.read(f"{far_url}/object") == b"1"


def test_parts_of_an_object_that_was_replaced_meanwhile_are_not_mixed(proxy, far_url, monkeypatch):
    old, new = b"o" * 2500, b"n" * 2500
    store.write(f"{far_url}/object", old)
    monkeypatch.setattr(s3, "PART_BYTES", 1000)
    monkeypatch.setattr(s3, "RETRY_FOR_S", 0.0)

    def replaced_after_the_first(request: faulty_proxy.Exchange) -> None:
        answer = request.ask()
        proxy.faults = []
        monkeypatch.setenv("PROD_S3_CHECKPOINT_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
        boto3.client("s3").put_object(Bucket=far_url.split("/")[2], Key=far_url.split("/", 3)[3] + "/object", Body=new)
        request.reply(*answer)

    proxy.faults = [replaced_after_the_first]
    with pytest.raises(UnavailableError, match="was replaced while it was read"):
        store.read(f"{far_url}/object")


def test_a_server_that_knows_no_ranges_gives_the_same_bytes(proxy, far_url, monkeypatch):
    data = os.urandom(2500)
    store.write(f"{far_url}/object", data)
    monkeypatch.setattr(s3, "PART_BYTES", 1000)
    proxy.always = lambda request: request.reply(*request.ask("Range"))
    assert store.read(f"{far_url}/object") == data
    assert store.read(f"{far_url}/object", 700, 1900) == data[700:1900]


def test_a_server_without_conditional_writes_is_found_and_overwrites_no_object(proxy, far_url):
    assert store.decides_races(far_url)
    proxy.always = faulty_proxy.unconditional
    assert not store.decides_races(far_url)
    # One writer at a time, as a run on such a store is told to have.
    assert store.put_if_absent(f"{far_url}/layout", b"of the first attempt")
    assert not store.put_if_absent(f"{far_url}/layout", b"of the second")
    assert store.read(f"{far_url}/layout") == b"of the first attempt"
