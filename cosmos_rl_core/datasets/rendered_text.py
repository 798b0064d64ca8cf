"""Images of short words on small coloured signs, drawn without downloads.

Item ``i`` depends on the options and ``i`` only. The two splits share no word. The default font is Pillow's own, so
that pixels do not depend on a machine's fonts.
"""

import io
import itertools
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cosmos_rl_core import canonical, seeds
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Item, Prompt, prompt_id
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import media
from cosmos_rl_core.storage.file_digests import files_digest

BACKGROUNDS = (
    (250, 240, 230),
    (225, 240, 250),
    (232, 246, 224),
    (252, 230, 236),
    (250, 246, 208),
    (236, 232, 250),
)
INKS = ((20, 20, 20), (150, 20, 25), (15, 45, 130), (10, 90, 45), (95, 25, 115))
MAX_WORDS = 1_000_000

Rgb = tuple[int, int, int]


class Options(DatasetOptions):
    """Words, look and number of the images."""

    name: Literal["rendered_text"] = "rendered_text"  # pyright: ignore[reportIncompatibleVariableOverride]

    alphabet: str = Field(default="ACEHKLPTXY347", min_length=1)
    """Characters of the words. The default characters are hard to confuse, in upper and lower case."""
    length: int = Field(default=2, ge=1, le=8)
    """Number of characters of a word. Every word of this length is in one of the two splits."""
    split: Literal["train", "test"] = "train"
    """Words to draw. The train split has no test word."""
    num_test_words: int = Field(default=40, ge=1)
    """Number of words in the test split."""
    num_items: int = Field(default=8192, ge=1)
    """Number of images. Raising it leaves earlier images unchanged."""
    size: tuple[PositiveInt, PositiveInt] = (32, 64)
    """Height and width of an image in pixels."""
    fonts: tuple[str, ...] = ()
    """Paths of font files to choose from. Default: Pillow's own font, the same on every machine."""
    font_sizes: tuple[PositiveInt, PositiveInt] = (23, 26)
    """Smallest and largest font size in pixels, inclusive."""
    stroke_width: int = Field(default=1, ge=0, le=8)
    """Thickening of letters in pixels; Pillow's own font is thin."""
    jitter: tuple[NonNegativeInt, NonNegativeInt] = (2, 1)
    """Largest horizontal and vertical shift of a word from the middle, in pixels."""
    dirty: float = Field(default=0.3, ge=0, le=1)
    """Share of images with strike lines, blur or fading."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        visible = all(c.isprintable() and not c.isspace() and c != '"' for c in self.alphabet)
        if not visible or len(set(self.alphabet)) != len(self.alphabet):
            expected = "must hold different visible characters, no double quote"
            raise ValueError(f"alphabet {self.alphabet!r} {expected}")
        num_words = len(self.alphabet) ** self.length
        if num_words > MAX_WORDS:
            raise ValueError(f"alphabet and length make {num_words} words, more than {MAX_WORDS}")
        if num_words <= self.num_test_words:
            raise ValueError(f"{self.num_test_words} test words leave none of {num_words} words")
        if self.font_sizes[0] > self.font_sizes[1]:
            raise ValueError(f"font_sizes {list(self.font_sizes)} fall; write the smallest first")
        return self


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return a prompt for each word of the split, in alphabet order, with the word between double quotes."""
    return tuple(Prompt(id=prompt_id(text), text=text) for text in map(prompt_text, words(options)))


def prompt_text(word: str) -> str:
    """Return the caption of an image of ``word``."""
    return f'a sign that says "{word}"'


def words(options: Options) -> list[str]:
    """Return the words of the split in alphabet order; they depend on alphabet, length and ``num_test_words`` only."""
    alphabet, length, tests = options.alphabet, options.length, options.split == "test"
    every = map("".join, itertools.product(alphabet, repeat=length))
    order = seeds.permutation(len(alphabet) ** length, "rendered_text", "split", alphabet, length)
    test = set(order[: options.num_test_words])
    return [word for index, word in enumerate(every) if (index in test) == tests]


def digest(options: Options) -> str:
    """Return the digest of the font files, "" for Pillow's own. Raises :class:`ConfigError` if one is missing."""
    if missing := [font for font in options.fonts if not Path(font).is_file()]:
        raise ConfigError(f"cannot read font file {', '.join(missing)}: not a file")
    return files_digest({font: Path(font) for font in options.fonts}) if options.fonts else ""


class Media:
    """Images of the split's words with random access. Word, colours, place and damage vary."""

    def __init__(self, options: Options):
        self._options = options
        self._words = words(options)
        self.shape = (1, *options.size)
        self.prompts = prompts(options)
        self.item_ids = tuple(f"{index:08d}" for index in range(options.num_items))

    def __len__(self) -> int:
        return self._options.num_items

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of item ``index``. Raises ``IndexError`` beyond the set."""
        return self.prompts[self._begin(index)[1]]

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Return item ``index``: uint8 RGB pixels ``[1, height, width, 3]``, and its prompt.

        Raises ``IndexError`` beyond the set.
        """
        rng, which = self._begin(index)
        return draw(self._words[which], self._options, rng)[None], self.prompts[which]

    def fault(self, index: int) -> None:
        """Return None: items are drawn."""

    def _begin(self, index: int) -> tuple[np.random.Generator, int]:
        """Return the item's generator after its first draw, and that draw: the index of the word."""
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a set of {len(self)}")
        rng = seeds.generator("rendered_text", self._options.split, index)
        return rng, int(rng.integers(len(self._words)))


class Source:
    """The images as PNG files: a unit is an image."""

    def __init__(self, options: Options):
        self._media, self._stamp = Media(options), canonical.digest([options.identity(), digest(options)])

    def stamps(self) -> dict[str, str]:
        """Return one stamp for all images: the digest of the options. Any change of them reads all images again."""
        return dict.fromkeys(self._media.item_ids, self._stamp)

    def items(self, unit: str) -> list[Item]:
        """Return the one image of a unit, with its caption."""
        return [Item(unit, "image", self._media.prompt_of(int(unit)).text)]

    def open(self, name: str) -> BinaryIO:
        """Open an image by its id."""
        pixels, _ = self._media.item(int(name))
        return io.BytesIO(media.encode(pixels)[1])


def draw(word: str, options: Options, rng: np.random.Generator) -> np.ndarray:
    """Draw one sign with a random look; return uint8 RGB ``[height, width, 3]``."""
    height, width = options.size
    background = BACKGROUNDS[rng.integers(len(BACKGROUNDS))]
    ink = INKS[rng.integers(len(INKS))]
    path = options.fonts[rng.integers(len(options.fonts))] if options.fonts else ""
    font = _font(path, int(rng.integers(options.font_sizes[0], options.font_sizes[1] + 1)))
    across, down = (int(rng.integers(-most, most + 1)) for most in options.jitter)
    image = Image.new("RGB", (width, height), background)
    pen = ImageDraw.Draw(image)
    # Letter by letter: at the font's own distances, thick letters ("TT") touch.
    look: dict[str, Any] = {"fill": ink, "anchor": "mm", "stroke_width": options.stroke_width}
    steps = [font.getlength(letter) + 2 * options.stroke_width for letter in word]
    left = width / 2 + across - sum(steps) / 2
    for letter, step in zip(word, steps, strict=True):
        pen.text((left + step / 2, height / 2 + down), letter, font=font, **look)
        left += step
    if rng.random() < options.dirty:
        image = _spoil(image, background, ink, rng)
    return np.asarray(image, dtype=np.uint8)


def _spoil(image: Image.Image, background: Rgb, ink: Rgb, rng: np.random.Generator) -> Image.Image:
    kind = rng.integers(4)
    if kind < 2:
        for _ in range(int(kind) + 1):
            _strike(image, ink, rng)
        return image
    if kind == 2:
        return image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.6, 1.1))))
    faded = Image.new("RGB", image.size, background)
    return Image.blend(image, faded, float(rng.uniform(0.4, 0.65)))


def _strike(image: Image.Image, ink: Rgb, rng: np.random.Generator) -> None:
    left, right = (float(y) for y in rng.uniform(0.25, 0.75, size=2) * image.height)
    line = Image.new("RGB", image.size, (255, 255, 255))
    ImageDraw.Draw(line).line([(0, left), (image.width, right)], fill=ink, width=1)
    image.paste(ImageChops.darker(image, line))


@cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a font with the basic layout engine; the other one is not on every machine and moves letters."""
    if not path:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
        return font.font_variant(layout_engine=ImageFont.Layout.BASIC)
    try:
        return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ConfigError(f"cannot read font file {path}: {error}") from error
