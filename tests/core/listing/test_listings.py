"""Listings of folders: what is in them, how often they are made, and stamps of files."""

import os
from pathlib import Path

from cosmos_rl_core.listing import listings
from cosmos_rl_core.listing.listings import Listing, Seen
from cosmos_rl_core.listing.stamps import local_stamps


def test_a_listing_has_the_names_that_are_directly_in_each_folder():
    found = Listing.of(
        "s3://b/run", {"plan.json": Seen(3, "a"), "policy/1/w": Seen(5, "b"), "policy/2/w": Seen(7, "c")}
    )
    assert found.files["s3://b/run/policy/2/w"] == (7, "c")
    assert found.names == {
        "s3://b/run": {"plan.json", "policy"},
        "s3://b/run/policy": {"1", "2"},
        "s3://b/run/policy/1": {"w"},
        "s3://b/run/policy/2": {"w"},
    }


def test_a_folder_is_listed_once_inside_a_block_until_something_is_written_there():
    listed: list[str] = []

    def made(folder: str) -> Listing:
        listed.append(folder)
        return Listing.of(folder, {"a": Seen(1, "x")})

    def folder_of(url: str) -> str | None:
        return url.rpartition("/")[0] if url.startswith("runs/") else None

    assert listings.listing_of("runs/1/a", made) is None
    with listings.listed_once(folder_of):
        assert listings.looks_in_listings()
        for name in ("a", "b"):
            assert listings.listing_of(f"runs/1/{name}", made) == Listing.of("runs/1", {"a": Seen(1, "x")})
        assert listings.listed_folder("runs/2/a", made) == ("runs/2", {"runs/2/a": Seen(1, "x")})
        assert listings.listing_of("elsewhere/a", made) is None
        assert listed == ["runs/1", "runs/2"]
        listings.forget("runs/1/new")
        listings.listing_of("runs/1/a", made)
        listings.listing_of("runs/2/b", made)
        assert listed == ["runs/1", "runs/2", "runs/1"]
    assert not listings.looks_in_listings()


def test_local_files_are_listed_with_their_sizes_and_links_without_a_file_are_none(tmp_path: Path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a").write_bytes(b"123")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    found = listings.local_files(str(tmp_path))
    assert found is not None
    assert {name: seen.size for name, seen in found.items()} == {"deep/er/a": 3}
    assert listings.local_files(str(tmp_path / "absent")) == {}


def test_stamps_change_with_a_file_and_circles_of_links_are_left(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_bytes(b"1")
    (tmp_path / ".hidden").write_bytes(b"1")
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    before = dict(local_stamps(str(tmp_path)))
    assert [*before] == ["a/one.txt"]
    os.utime(tmp_path / "a" / "one.txt", ns=(10**18, 10**18))
    after = dict(local_stamps(str(tmp_path)))
    assert after != before
    (tmp_path / "a" / "one.txt").write_bytes(b"12")
    os.utime(tmp_path / "a" / "one.txt", ns=(10**18, 10**18))
    assert after != dict(local_stamps(str(tmp_path)))
