"""A folder of media: layouts, cutting to size, frames, every mistake, and what its digest covers."""

import io
import json
import os
import struct

import av
import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from cosmos_rl_core.datasets import _clips, _sources, local, rendered_text
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import media

VIDEO = np.random.default_rng(0).integers(0, 256, (6, 16, 32, 3), dtype=np.uint8)


def options(folder, size=(4, 4), frames=1):
    return local.Options(local_dir=str(folder), size=size, frames=frames)


def picture(color, height=4, width=4):
    return np.full((1, height, width, 3), color, dtype=np.uint8)


def write_flat(folder, stem, pixels, about):
    folder.mkdir(exist_ok=True)
    extension, data = media.encode(pixels)
    (folder / f"{stem}.{extension}").write_bytes(data)
    (folder / f"{stem}.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def write_folders(folder, stem, pixels, caption):
    extension, data = media.encode(pixels)
    for name, file, content in (
        ("videos" if len(pixels) > 1 else "images", f"{stem}.{extension}", data),
        ("metas", f"{stem}.txt", caption.encode()),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_bytes(content)
    return folder


def mistakes_of(chosen):
    with pytest.raises(ConfigError) as caught:
        local.prompts(chosen)
    return str(caught.value).split("\n    ")


def faults_of(chosen):
    """What is wrong with the media, though the set was planned."""
    items = local.Media(chosen)
    assert items.prompts == local.prompts(chosen)
    found = [(items.fault(index), index) for index in range(len(items))]
    for fault, index in found:
        if fault:
            with pytest.raises(ConfigError, match=fault.partition(":")[0]):
                items.item(index)
    return [fault for fault, _ in found if fault]


def test_both_layouts_hold_the_same_items(tmp_path):
    for stem, color in (("b", 200), ("a", 100), ("c", 50)):
        caption = "a sign" if stem == "c" else f"picture {stem}"
        write_flat(tmp_path / "flat", stem, picture(color), {"prompt": caption, "fps": 3})
        write_folders(tmp_path / "folders", stem, picture(color), f" {caption}\n")
    flat, folders = (local.Media(options(tmp_path / name)) for name in ("flat", "folders"))
    assert flat.item_ids == folders.item_ids == ("a", "b", "c")
    assert flat.prompts == folders.prompts == local.prompts(options(tmp_path / "flat"))
    assert [prompt.text for prompt in flat.prompts] == ["picture a", "picture b", "a sign"]
    for index, color in enumerate((100, 200, 50)):
        for items in (flat, folders):
            np.testing.assert_array_equal(items.item(index)[0], picture(color))
            assert items.prompt_of(index) == flat.item(index)[1]


def test_captions_of_a_flat_folder_may_be_text(tmp_path):
    for stem in ("a", "b"):
        write_flat(tmp_path, stem, picture(1), {"prompt": f"picture {stem}"})
    (tmp_path / "a.json").unlink()
    (tmp_path / "a.txt").write_text("a text\n", encoding="utf-8")
    assert [prompt.text for prompt in local.prompts(options(tmp_path))] == ["a text", "picture b"]
    (tmp_path / "b.txt").write_text("another", encoding="utf-8")
    assert mistakes_of(options(tmp_path))[1:] == ["b.png: more than one caption: b.json, b.txt"]


def test_items_of_one_caption_share_a_prompt(tmp_path):
    for stem in ("a", "b"):
        write_flat(tmp_path, stem, picture(1), {"prompt": "twice"})
    items = local.Media(options(tmp_path))
    assert [prompt.text for prompt in items.prompts] == ["twice"]
    assert items.prompt_of(0) == items.prompt_of(1)


def test_other_and_hidden_files_do_not_count(tmp_path):
    write_flat(tmp_path, "a", picture(1), {"prompt": "one"})
    before = local.digest(options(tmp_path))
    for name in ("README.md", ".hidden.json", "._a.png", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert local.prompts(options(tmp_path)) == local.Media(options(tmp_path)).prompts
    assert local.digest(options(tmp_path)) == before


@pytest.mark.parametrize(
    ("shape", "size", "rows", "columns"),
    [
        # Sides that stick out are cut off evenly, an odd one below or right.
        ((4, 10), (4, 4), (0, 4), (3, 7)),
        ((4, 9), (4, 4), (0, 4), (2, 6)),
        ((12, 4), (6, 4), (3, 9), (0, 4)),
        ((7, 4), (4, 4), (1, 5), (0, 4)),
        ((5, 6), (5, 6), (0, 5), (0, 6)),
    ],
)
def test_media_that_need_no_scaling_keep_their_pixels(shape, size, rows, columns):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    cut = _clips.fit(Image.fromarray(pixels), size)
    np.testing.assert_array_equal(cut, pixels[rows[0] : rows[1], columns[0] : columns[1]])


def test_the_shorter_side_is_scaled_to_fit_and_the_longer_one_cut():
    stripes = np.zeros((40, 120, 3), np.uint8)
    stripes[:, 40:80] = (250, 100, 50)
    middle = _clips.fit(Image.fromarray(stripes), (20, 20))
    assert middle.shape == (20, 20, 3)
    assert np.unique(middle[:, 2:-2].reshape(-1, 3), axis=0).tolist() == [[250, 100, 50]]
    # Tall: the width decides, and the middle quarter of the height is left.
    tall = _clips.fit(Image.fromarray(stripes.transpose(1, 0, 2)), (10, 20))
    assert tall.shape == (10, 20, 3)
    assert np.unique(tall.reshape(-1, 3), axis=0).tolist() == [[250, 100, 50]]
    # Enlarged: a single pixel fills everything.
    assert np.unique(_clips.fit(Image.fromarray(stripes[:1, 40:41]), (3, 5)).reshape(-1, 3), axis=0).tolist() == [
        [250, 100, 50]
    ]


def test_a_photograph_is_seen_upright(tmp_path):
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    (tmp_path / "a.json").write_text('{"prompt": "p"}', encoding="utf-8")
    seen = local.Media(options(tmp_path, size=(8, 4))).item(0)[0]
    np.testing.assert_array_equal(seen[0], np.rot90(pixels, -1))


def test_a_video_gives_its_first_frames_as_they_are(tmp_path):
    write_folders(tmp_path, "clip", VIDEO, "noise")
    for frames in (1, 5, 6):
        pixels, prompt = local.Media(options(tmp_path, (16, 32), frames)).item(0)
        np.testing.assert_array_equal(pixels, VIDEO[:frames])
        assert prompt.text == "noise"
    cut, _ = local.Media(options(tmp_path, (16, 16), 5)).item(0)
    np.testing.assert_array_equal(cut, VIDEO[:5, :, 8:24])


def test_clips_of_one_caption_and_first_frame_have_one_prompt(tmp_path):
    for stem, pixels in {"a": VIDEO, "b": VIDEO[[0, 2, 1]], "c": VIDEO[1:]}.items():
        write_folders(tmp_path, stem, pixels, "noise")
    chosen = options(tmp_path, (16, 32), 3).model_copy(update={"first_frame": True})
    a, c = local.prompts(chosen)
    items = local.Media(chosen)
    assert items.prompts == (a, c)
    assert [items.prompt_of(index).id for index in range(3)] == [a.id, a.id, c.id]


def test_a_video_is_seen_as_its_camera_was_held(tmp_path):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16] = 255
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width, stream.pix_fmt = 16, 32, "yuv420p"
        packets = [*stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")), *stream.encode()]
        container.mux(packets)
    upright, turned = (struct.pack(">9i", *(65536 * x for x in m), 1 << 30) for m in (
        (1, 0, 0, 0, 1, 0, 0, 0), (0, 1, 0, -1, 0, 0, 16, 0)
    ))  # fmt: skip
    data = buffer.getvalue()
    header = data.index(b"tkhd")
    (tmp_path / "a.mp4").write_bytes(data[:header] + data[header:].replace(upright, turned, 1))
    (tmp_path / "a.json").write_text('{"prompt": "p"}', encoding="utf-8")
    seen = local.Media(options(tmp_path, size=(32, 16))).item(0)[0]
    assert np.abs(seen[0].astype(int) - np.rot90(pixels, -1)).max() <= 4


def write_mp4(file, pixels):
    """H.264 that loses nothing, with frames that depend on others."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264rgb", rate=24, options={"crf": "0", "bf": "2", "g": "4"})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[1:3], "rgb24"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def test_captions_next_to_a_folder_of_mp4s_may_be_text_or_json(tmp_path):
    for name in ("videos", "metas"):
        (tmp_path / name).mkdir()
    for stem in ("a", "b"):
        write_mp4(tmp_path / "videos" / f"{stem}.mp4", VIDEO if stem == "a" else VIDEO[::-1])
    (tmp_path / "metas" / "a.txt").write_text(" a robot\n", encoding="utf-8")
    (tmp_path / "metas" / "b.json").write_text('{"prompt": "a truck", "fps": 24}', encoding="utf-8")
    items = local.Media(options(tmp_path, (16, 32), 5))
    assert [items.item(i)[1].text for i in (0, 1)] == ["a robot", "a truck"]
    np.testing.assert_array_equal(items.item(0)[0], VIDEO[:5])
    np.testing.assert_array_equal(items.item(1)[0], VIDEO[:0:-1])
    before = local.digest(options(tmp_path))
    (tmp_path / "metas" / "b.txt").write_text("a lorry", encoding="utf-8")
    assert mistakes_of(options(tmp_path)) == [f"{tmp_path}:", "b.mp4: more than one caption: b.json, b.txt"]
    assert local.digest(options(tmp_path)) != before


def test_clips_of_a_video_begin_and_end_with_it(tmp_path):
    for name in ("videos", "metas"):
        (tmp_path / name).mkdir()
    write_mp4(tmp_path / "videos" / "a.mp4", VIDEO)
    write_folders(tmp_path, "b", VIDEO[:5], "p")
    (tmp_path / "metas" / "a.txt").write_text("p", encoding="utf-8")
    chosen = local.Options(local_dir=str(tmp_path), size=(16, 32), frames=3, clips=3)
    items = local.Media(chosen)
    assert items.item_ids == ("a-00", "a-01", "a-02", "b-00", "b-01", "b-02")
    for index, start in enumerate((0, 1, 3, 0, 1, 2)):
        np.testing.assert_array_equal(items.item(index)[0], VIDEO[start : start + 3])
        assert items.prompt_of(index) == local.prompts(chosen)[0]
    assert faults_of(chosen) == []
    # A medium is named once, whatever the number of its clips.
    assert faults_of(chosen.model_copy(update={"clips": 4})) == [
        "b.mkv: 5 frames, expected at least 6 for 4 clips of 3"
    ]
    assert options(tmp_path).identity()["clips"] == 1
    assert chosen.identity()["clips"] == 3


def test_every_mistake_of_a_flat_folder_is_reported_at_once(tmp_path):
    for stem in ("good", "list", "blank", "number", "broken", "two", "a b"):
        write_flat(tmp_path, stem, VIDEO[:5], {"prompt": "p"})
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    (tmp_path / "blank.json").write_text('{"prompt": " "}', encoding="utf-8")
    (tmp_path / "number.json").write_text('{"prompt": 3}', encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "no-media.json").write_text('{"prompt": "p"}', encoding="utf-8")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "bytes.mkv").write_bytes(b"no video")
    (tmp_path / "silent.mkv").write_bytes((tmp_path / "good.mkv").read_bytes())
    (tmp_path / "two.mp4").write_bytes((tmp_path / "good.mkv").read_bytes())
    found = mistakes_of(options(tmp_path, (16, 32), 5))
    expected = [
        f"{tmp_path}:",
        "a b.mkv: rename it to at most 80 letters, digits, '_', '-' and '.'",
        "blank.json: the caption is empty",
        "broken.json: cannot be read: Expecting",
        "bytes.json: cannot be read: 'utf-8' codec",
        'list.json: no caption; expected an object with the text "prompt"',
        "no-media.json: no image or video of that name",
        'number.json: no caption; expected an object with the text "prompt"',
        "silent.mkv: no caption",
        "two.mkv: more than one medium: two.mkv, two.mp4",
    ]
    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_media_that_are_damaged_or_short_are_named_after_planning(tmp_path):
    for stem in ("good", "empty", "cut", "page", "garbage"):
        write_flat(tmp_path, stem, VIDEO[:5], {"prompt": "p"})
    write_flat(tmp_path, "short", VIDEO[:4], {"prompt": "p"})
    write_flat(tmp_path, "image", picture(1), {"prompt": "p"})
    whole = (tmp_path / "good.mkv").read_bytes()
    start = len(whole) // 4
    for stem, data in (
        ("empty", b""),
        ("cut", whole[:3000]),
        ("page", b"<!doctype html><title>404</title>"),
        ("garbage", whole[:start] + bytes(len(whole) - start)),
    ):
        (tmp_path / f"{stem}.mkv").write_bytes(data)
    found = faults_of(options(tmp_path, (16, 32), 5))
    expected = ["cut.mkv: ", "empty.mkv: cannot be read: ", "garbage.mkv: ", "image.png: 1 frames, expected at least 5",
                "page.mkv: cannot be read: ", "short.mkv: 4 frames, expected at least 5"]  # fmt: skip
    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_every_mistake_of_folders_is_reported_at_once(tmp_path):
    for stem in ("good", "silent", "broken", "deep"):
        write_folders(tmp_path, stem, VIDEO[:1], "p")
    (tmp_path / "metas" / "silent.txt").unlink()
    (tmp_path / "metas" / "alone.txt").write_text("p", encoding="utf-8")
    whole = (tmp_path / "images" / "broken.png").read_bytes()
    (tmp_path / "images" / "broken.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "images" / "deep.png")
    first, *found = mistakes_of(options(tmp_path))
    assert first == f"{tmp_path}:"
    assert found == ["alone.txt: no image or video of that name", "silent.png: no caption"]
    (tmp_path / "metas" / "alone.txt").unlink()
    (tmp_path / "images" / "silent.png").unlink()
    broken, deep = faults_of(options(tmp_path))
    assert broken.startswith("broken.png: cannot be read: ")
    assert deep == "deep.png: cannot be read: mode I;16, expected 8 bits a channel"


def test_a_path_that_cannot_be_a_folder_of_media_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder at .*nowhere"):
        local.prompts(options(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"no folder at .*file"):
        local.prompts(options(tmp_path / "file"))
    (tmp_path / "file").unlink()
    with pytest.raises(ConfigError, match=r"s3://b/clips is not on a disk; copy it to one"):
        local.digest(options("s3://b/clips"))
    assert mistakes_of(options(tmp_path)) == [f"{tmp_path}:", "no image or video with a caption"]
    write_folders(tmp_path, "a", picture(1), "p")
    write_folders(tmp_path, "b", VIDEO, "p")
    with pytest.raises(ConfigError, match="both images/ and videos/"):
        local.prompts(options(tmp_path))


def test_of_very_many_mistakes_some_are_listed_and_the_rest_counted(tmp_path):
    for index in range(60):
        (tmp_path / f"{index}.json").write_text('{"prompt": "p"}', encoding="utf-8")
    found = mistakes_of(options(tmp_path))
    assert len(found) == 52
    assert found[-1] == "and 10 more"


@pytest.mark.parametrize("wrong", [{"size": (0, 4)}, {"frames": 0}, {"local_dirr": "x"}])
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValidationError):
        local.Options(**({"local_dir": "x"} | wrong))


def test_a_file_lost_after_the_folder_was_opened_is_named(tmp_path):
    items = local.Media(options(write_flat(tmp_path, "a", picture(1), {"prompt": "p"})))
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigError, match=r"a\.png: cannot be read"):
        items.item(0)


def test_a_file_that_cannot_be_read_is_named_by_the_digest(tmp_path):
    write_flat(tmp_path, "a", picture(1), {"prompt": "p"})
    (tmp_path / "b.png").symlink_to("/proc/self/mem")  # reading its first byte fails, also for root
    with pytest.raises(ConfigError, match=r"a file cannot be read: Input/output error"):
        local.digest(options(tmp_path))


def test_the_digest_is_of_names_and_bytes(tmp_path):
    folder = write_flat(tmp_path / "one", "a", picture(1), {"prompt": "p"})
    write_flat(folder, "b", picture(2), {"prompt": "q"})
    first = local.digest(options(folder))
    os.utime(folder / "a.png", (1, 1))
    assert local.digest(options(folder)) == first
    moved = folder.rename(tmp_path / "two")
    assert local.digest(options(moved)) == first
    assert options(moved).identity() == options(folder).identity()

    seen = {first}
    for name in ("a.png", "a.json", "b.png", "b.json"):
        whole = (moved / name).read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            (moved / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            seen.add(local.digest(options(moved)))
        (moved / name).write_bytes(whole)
    assert len(seen) == 13
    assert local.digest(options(moved)) == first
    (moved / "b.png").rename(moved / "c.png")
    seen.add(local.digest(options(moved)))
    (moved / "c.png").unlink()
    seen.add(local.digest(options(moved)))
    assert len(seen) == 15


def test_a_generated_set_has_a_digest_where_it_reads_fonts(tmp_path):
    assert rendered_text.digest(rendered_text.Options()) == ""
    font = tmp_path / "font.ttf"
    chosen = rendered_text.Options(fonts=(str(font),))
    with pytest.raises(ConfigError, match=r"font\.ttf"):
        rendered_text.digest(chosen)
    digests = set()
    for content in (b"1", b"2"):
        font.write_bytes(content)
        digests.add(rendered_text.digest(chosen))
    assert len(digests - {""}) == 2


def test_names_of_files_that_are_no_text_are_listed_when_a_dataset_is_prepared(tmp_path):
    folder = write_flat(tmp_path / "flat", "a", picture(0), {"prompt": "a"})
    for name in (b"caf\xe9.png", b"\xff.png"):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write((folder / "a.png").read_bytes())
    with pytest.raises(ConfigError) as caught:
        _sources.digest(_sources.stamps({"mine": local.Source(options(folder))}))
    named = [r"mine/caf\udce9", r"mine/\udcff"]
    assert str(caught.value).split("\n    ") == ["names of files that are not UTF-8; rename the files:", *named]
