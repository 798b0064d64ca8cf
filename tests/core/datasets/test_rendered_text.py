import numpy as np
import pytest
from pydantic import ValidationError

from cosmos_rl_core.datasets import ocr
from cosmos_rl_core.datasets import rendered_text as rendered
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import media


def write(folder, split, text):
    (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    return ocr.Options(local_dir=str(folder), split=split)


def word_of(prompt):
    return prompt.text.split('"')[1]


def test_129_words_are_trained_on_and_40_held_out():
    train, test = (rendered.prompts(rendered.Options(split=split)) for split in ("train", "test"))
    assert (len(train), len(test)) == (129, 40)
    assert len({word_of(prompt) for prompt in train + test}) == 13**2
    assert len({prompt.id for prompt in train + test}) == 13**2


def test_the_held_out_words_stay_the_same_from_version_to_version():
    held_out = {word_of(prompt) for prompt in rendered.prompts(rendered.Options(split="test"))}
    assert {"AA", "AE", "CX", "K7", "3H", "74"} <= held_out


def test_held_out_words_never_appear_in_train_media():
    held_out = set(rendered.words(rendered.Options(split="test")))
    media = rendered.Media(rendered.Options(num_items=500))
    assert not held_out & {word_of(media.item(i)[1]) for i in range(500)}


def test_a_larger_alphabet_or_other_length_still_splits_every_word():
    options = rendered.Options(alphabet="AB", length=3, num_test_words=3)
    test = rendered.words(options.model_copy(update={"split": "test"}))
    assert sorted(rendered.words(options) + test) == ["AAA", "AAB", "ABA", "ABB", "BAA", "BAB", "BBA", "BBB"]


def test_items_do_not_depend_on_the_order_of_access():
    forward, backward = rendered.Media(rendered.Options()), rendered.Media(rendered.Options())
    first = [forward.item(i) for i in range(8)]
    second = [backward.item(i) for i in reversed(range(8))][::-1]
    for (pixels, prompt), (pixels_again, prompt_again) in zip(first, second, strict=True):
        assert prompt == prompt_again
        assert np.array_equal(pixels, pixels_again)


def test_raising_the_number_of_items_keeps_the_earlier_ones():
    few, many = (rendered.Media(rendered.Options(num_items=n)) for n in (4, 4000))
    assert np.array_equal(few.item(3)[0], many.item(3)[0])
    with pytest.raises(IndexError):
        few.item(4)


def test_an_item_is_one_dark_word_on_a_light_sign():
    pixels, prompt = rendered.Media(rendered.Options(dirty=0)).item(0)
    assert pixels.shape == (1, 32, 64, 3)
    assert pixels.dtype == np.uint8
    assert pixels[0, 0].min() > 200
    assert pixels.min() < 50
    assert prompt.text == f'a sign that says "{word_of(prompt)}"'


def test_signs_are_files_of_a_source_too():
    options = rendered.Options(num_items=3)
    source, drawn = rendered.Source(options), rendered.Media(options)
    assert list(source.stamps()) == list(drawn.item_ids)
    for index, unit in enumerate(source.stamps()):
        (item,) = source.items(unit)
        pixels, prompt = drawn.item(index)
        assert (item.name, item.kind, item.caption) == (unit, "image", prompt.text)
        np.testing.assert_array_equal(media.decode("png", source.open(unit).read()), pixels)
    assert source.stamps() != rendered.Source(rendered.Options(num_items=3, jitter=(0, 0))).stamps()


def test_only_dirty_items_differ_between_a_clean_and_a_dirty_set():
    clean, some, every = (rendered.Media(rendered.Options(dirty=dirty)) for dirty in (0, 0.3, 1))

    def num_changed(media):
        return sum(not np.array_equal(clean.item(i)[0], media.item(i)[0]) for i in range(200))

    assert 40 <= num_changed(some) <= 80
    assert num_changed(every) == 200


@pytest.mark.parametrize(
    "wrong",
    [{"alphabet": "AAB"}, {"alphabet": 'A"'}, {"num_test_words": 169}, {"length": 7}, {"font_sizes": (9, 8)}],
)
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValidationError):
        rendered.Options(**wrong)


def test_a_missing_font_is_named():
    with pytest.raises(ConfigError, match=r"no-such-font\.ttf"):
        rendered.Media(rendered.Options(fonts=("no-such-font.ttf",))).item(0)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_shipped_prompts_equal_rendered_texts(split):
    assert ocr.prompts(ocr.Options(split=split)) == rendered.prompts(rendered.Options(split=split))


def test_prompt_ids_follow_the_text_and_not_the_line(tmp_path):
    one = ocr.prompts(write(tmp_path, "train", 'a "B"\n\n  a "C"  \n'))
    other = ocr.prompts(write(tmp_path, "test", 'a "C"\na "B"'))
    assert [prompt.text for prompt in one] == ['a "B"', 'a "C"']
    assert one == other[::-1]


def test_a_missing_and_an_empty_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path / "test.txt")):
        ocr.prompts(ocr.Options(local_dir=str(tmp_path), split="test"))
    with pytest.raises(ConfigError, match="holds no prompt"):
        ocr.prompts(write(tmp_path, "train", "\n \n"))


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        ocr.prompts(ocr.Options(local_dir=str(tmp_path)))
