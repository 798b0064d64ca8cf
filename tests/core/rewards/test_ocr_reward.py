import numpy as np
import pytest

from cosmos_rl_core.datasets import rendered_text as rendered
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import ocr
from cosmos_rl_core.rewards._base import Sample


@pytest.fixture(scope="module")
def reward():
    return ocr.Reward(ocr.Options(line_width=96))


def drawn(word, size=(32, 64)):
    """One clean sign that shows ``word``: uint8 ``[1, height, width, 3]``."""
    return rendered.draw(word, rendered.Options(dirty=0, size=size), np.random.default_rng(0))[None]


def sample(wanted, pixels):
    return Sample(sample_id="s", prompt_id="p", prompt=rendered.prompt_text(wanted), pixels=pixels)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "abc", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)],
)
def test_edit_distance_counts_single_changes(a, b, distance):
    assert ocr.edit_distance(a, b) == distance


def test_similarity_is_one_minus_changes_per_wanted_character():
    assert ocr.similarity("k 7", "K7") == 1.0
    assert ocr.similarity("K4", "K7") == 0.5
    assert ocr.similarity("", "K7") == 0.0
    assert ocr.similarity("K7K7K7", "K7") == 0.0
    assert ocr.similarity("HELO", "Hello") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "wanted", "distance", "contained"),
    [
        ("ab", "AB", 1.0, 1.0),
        ("ABC", "AB", 0.5, 1.0),
        ("the best coffee in town", "Coffee", 0.0, 1.0),
        ("cofee", "Coffee", 5 / 6, 5 / 6),
        # The length counts the space of the wanted text, the distance does not.
        ("hello", "Hello World", 5 / 10, 6 / 11),
        ("", "A B", 0.0, 1 / 3),
        ("xyz", "A B", 0.0, 1 / 3),
        ("H ello World!", "Hello World", 9 / 10, 1.0),
        # White space other than spaces counts as characters.
        ("a b", "a\tb", 1.0, 2 / 3),
    ],
)
def test_the_two_ways_to_compare_texts(text: str, wanted: str, distance: float, contained: float):
    assert ocr.similarity(text, wanted) == pytest.approx(distance, abs=1e-12)
    assert ocr.containment(text, wanted) == pytest.approx(contained, abs=1e-12)


def test_the_option_decides_which_way_scores_and_the_version_names_it(reward):
    other = ocr.Reward(ocr.Options(line_width=96, match="contained"))
    # The sign shows one character more than is wanted.
    samples = [sample("K", drawn("K7"))]
    assert reward.score(samples) == [{"ocr": 0.0}]
    assert other.score(samples) == [{"ocr": 1.0}]
    assert other.version == f"{reward.version}, contained"
    assert "match" not in ocr.Options().identity()
    assert ocr.Options(match="contained").identity()["match"] == "contained"


def test_clean_signs_are_read(reward):
    media = rendered.Media(rendered.Options(dirty=0))
    items = [media.item(i) for i in range(32)]
    samples = [Sample(str(i), prompt.id, prompt.text, pixels) for i, (pixels, prompt) in enumerate(items)]
    assert np.mean([entry["ocr"] for entry in reward.score(samples)]) > 0.95


def test_a_wrong_sign_scores_as_the_formula_says(reward):
    blank = np.full((1, 32, 64, 3), 240, np.uint8)
    samples = [sample("K7", pixels) for pixels in (drawn("K7"), drawn("K4"), drawn("AE"), blank)]
    assert reward.score(samples) == [{"ocr": 1.0}, {"ocr": 0.5}, {"ocr": 0.0}, {"ocr": 0.0}]


def test_the_default_line_width_reads_the_same(reward):
    samples = [sample(word, drawn(word)) for word in ("K7", "HC", "TT")]
    assert ocr.Reward(ocr.Options()).score(samples) == reward.score(samples) == [{"ocr": 1.0}] * 3


def test_a_video_scores_the_mean_over_its_frames(reward):
    video = np.concatenate([drawn("K7"), drawn("K4"), drawn("K7"), drawn("K4")])
    assert reward.score([sample("K7", video)]) == [{"ocr": 0.75}]


def test_a_broken_sample_and_a_prompt_without_a_word_have_each_sample_scored_alone(reward):
    with pytest.raises(ValueError, match="float32"):
        reward.score([sample("K7", drawn("K7")), sample("HC", drawn("HC").astype(np.float32))])
    with pytest.raises(ValueError, match="needs the text to render between double quotes") as caught:
        reward.score([Sample("s", "p", "no quotes", drawn("K7"))])
    assert not isinstance(caught.value, ConfigError)


def test_scores_do_not_depend_on_the_other_samples(reward):
    sizes = {"K7": (32, 64), "HC": (32, 256), "AE": (64, 64), "TT": (32, 64)}
    samples = [sample(word, drawn(word, size)) for word, size in sizes.items()]
    assert reward.score(samples) == [reward.score([one])[0] for one in samples]


def test_no_samples_give_no_scores(reward):
    assert reward.score([]) == []


def test_prompts_without_a_word_are_explained(reward):
    def said(text):
        return reward.check_prompt(Prompt(id="p", text=text))

    assert said('a sign that says "K7"') is None
    assert "between double quotes" in said("a sign")
    assert "between double quotes" in said('a sign that says "K7')
    assert "nothing between" in said('a sign that says " "')


def test_the_version_names_packages_and_model(reward):
    assert reward.version.startswith("rapidocr 3.")
    assert "_rec_" in reward.version
    assert "sha256:" in reward.version
