"""Pages and artifacts show what prompts refer to before the results, read from the pool of the store."""

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.storage import store
from flows.comparing.comparison import compare
from flows.comparing.page import page as page_of_both
from flows.library import open_run
from flows.planning.run import Run
from flows.reporting import writing
from flows.reporting.report import page_now
from flows.session import loop
from flows.showing import contents
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import Warn
from stages.reporting.contracts import Report
from stages.reporting.pictures import REFERENCE_SIDE
from tests.flows.by_hand import recipe_in
from tests.flows.imagined import Imagined
from tests.flows.rescoring.stored import Store, rewards_file, wanted
from tests.hand_made import planned

SIZES = [(64, 96), (64, 64), (80, 64), (192, 384)]
"""Heights and widths of the pictures; the last one is larger than small pictures."""
TEXTS = ["add a hat", "make it red", "turn it", "make it night"]
EXACT = [(*size, 3) for size in SIZES[:3]]
LIMIT = 'limits = [{ reward = "pixel_similarity", score = "pixel_similarity", above = 0.1 }]'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two finished iterations of prompts with two references each, judged at their ends; samples are imagined."""
    folder = tmp_path_factory.mktemp("references")
    for number, (height, width) in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    rows = [{"prompt": text, "references": [f"{n}.png", f"{(n + 1) % 4}.png"]} for n, text in enumerate(TEXTS)]
    held = [row | {"prompt": f"{row['prompt']} now"} for row in rows[:2]]
    for name, some in {"train": rows, "held": held}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)), encoding="utf-8")
    (folder / "recipe").mkdir()
    path = recipe_in(folder / "recipe")(
        ("package:tiny-sd3", str(tiny_pipelines.save("flux2_klein", folder / "klein"))),
        (f'name = "ocr"\nlocal_dir = "{folder}/recipe/words"', f'name = "prompts"\npath = "{folder}/train.jsonl"'),
        ("[rollout]", f'[validation]\ndataset = {{ name = "prompts", path = "{folder}/held.jsonl" }}\n\n[rollout]'),
        ('name = "ocr", line_width = 96', 'name = "pixel_similarity"'),
        ("statistics = false", f"statistics = false\n{LIMIT}"),
    )
    for name in ("one", "other"):
        run = planned(path, folder, run_id=name, iterations=2)
        imagined = Imagined(run, folder, drift=0.002 if name == "one" else 0.1)
        with writing.Pages(run, print) as pages:
            imagined.done = pages.done
            loop.make(run, imagined.launch)
        assert pages.finished is not None
    return planned(path, folder, run_id="one", iterations=2)


def pool(run: Run) -> str:
    return store.join(run.store_url, "dataset", "references")


def expected(run: Run) -> dict[str, list[np.ndarray]]:
    """The pictures of each prompt, as they are shown, by its text."""
    prompts = (*run.plan.prompts, *run.plan.validation_prompts)
    return {one.text: [shown(store.read(store.join(pool(run), r.digest))) for r in one.references] for one in prompts}


def shown(data: bytes) -> np.ndarray:
    """Pixels of a picture in bytes, of at most the size of small pictures."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.thumbnail((REFERENCE_SIDE, REFERENCE_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(image, np.float32)


def thumbs(text: str) -> list[np.ndarray]:
    """Pixels of the references in a piece of a page, in order; their labels are there too."""
    found = re.findall(r'<img[^>]* src="data:image/webp;base64,([^"]+)"[^>]* alt="reference (\d)">', text)
    labels = re.findall(r"<span>reference (\d)</span>", text)
    assert [number for _, number in found] == labels
    return [shown(base64.b64decode(data)) for data, _ in found]


def require_equal(found: list[np.ndarray], right: list[np.ndarray]) -> None:
    """Small ones are exact; larger ones are compressed."""
    assert [one.shape for one in found] == [one.shape for one in right]
    for one, other in zip(found, right, strict=True):
        assert np.abs(one - other).mean() < (1e-6 if one.shape in EXACT else 8)


def cards(page: str) -> Iterator[tuple[str, str]]:
    """The prompt and the HTML of each card."""
    for card in re.split(r'<div class="card(?: \w*)?">', page)[1:]:
        prompt = re.search(r'<p class="prompt">(.*?)</p>', card)
        assert prompt is not None
        yield prompt[1], card[: prompt.start()]


def require_cards(page: str, pictures: dict[str, list[np.ndarray]]) -> None:
    """Every card has the references of its prompt, before its own pictures."""
    found = list(cards(page))
    assert found
    for prompt, card in found:
        require_equal(thumbs(card), pictures[prompt])
        first, *_, last = (match.start() for match in re.finditer("<img", card))
        assert first < card.index("reference 1</span>") < card.index("reference 2</span>") < last


def film(page: str) -> list[tuple[str, str]]:
    """The prompt and the strip of each row of the section over time."""
    section = page[page.index('<section id="film"') :].partition("</section>")[0]
    return [(row.partition(" <span>")[0], row) for row in section.split("<h3>")[1:]]


def test_the_report_shows_references_before_the_results_of_their_prompts(run: Run):
    artifact = Artifact(input_of(run.slots.report)).read(Report.PAGE).decode()
    for page in (store.read(writing.address(run)).decode(), artifact):
        require_cards(page, expected(run))
        for prompt, row in film(page):
            require_equal(thumbs(row), expected(run)[prompt])
            assert row.index("reference 2</span>") < row.index("policy 0")
        assert len(film(page)) > 1
        assert page.count(".references { display") == 1
    assert str(run.store_url) not in artifact


def test_warnings_and_comparisons_of_runs_show_references(run: Run, tmp_path: Path):
    warning = Artifact(input_of(run.slots.iteration(1, "warn"))).read(Warn.PAGE).decode()
    require_cards(warning, expected(run))
    both = compare("one", "other", run.store_url)
    require_cards(page_of_both(both, str(tmp_path)).decode(), expected(run))
    digests = {one.id: [r.digest for r in one.references] for one in run.plan.validation_prompts}
    for pair in both.as_json()["pictures"]:
        assert [*pair["references"]] == next(found for name, found in digests.items() if name in pair["sample"])


def test_a_re_score_shows_references(run: Run, tmp_path: Path):
    other = rewards_file(tmp_path, '[[rewards]]\nfn = { name = "jpeg" }\n')
    report = Store(tmp_path).rescore(wanted(run, other))
    require_cards(store.read(report.page).decode(), expected(run))


def test_the_reader_of_a_run_gives_digests_of_references(run: Run):
    opened = open_run("one", run.store_url)
    known = {one.id: [r.digest for r in one.references] for one in run.plan.validation_prompts}
    table = opened.held_out(2)
    assert [*table["references"]] == [known[one] for one in table["prompt_id"]]


def test_prefect_shows_references_above_the_results(run: Run):
    grid = contents.pictures(open_run("one", run.store_url).collected())
    tables = [part.splitlines() for part in grid.split("**policy ")[1:]]
    assert len(tables) == 2
    right = [expected(run)[text] for text in (f"{one} now" for one in TEXTS[:2])]
    for lines in tables:
        first, _, second, results, scores = (line.split(" | ") for line in lines[2:7])
        for number, cells in enumerate((first, second)):
            pictures = [re.findall(rf"reference {number + 1} !\[reference .\]\(.*?,(.*?)\)", one) for one in cells]
            prompts = [one.strip("| ").partition(" now")[0] for one in scores]
            for picture, prompt in zip(pictures, prompts, strict=True):
                require_equal([shown(base64.b64decode(picture[0]))], [right[TEXTS.index(prompt)][number]])
        assert all("](data:image" in one for one in results)


def test_pages_are_the_same_from_s3(run: Run, s3_url: str):
    here, there = run.store_url, f"{s3_url}/pages"
    for path in Path(here).rglob("*"):
        if path.is_file():
            store.write(f"{there}/{path.relative_to(here)}", path.read_bytes())
    require_cards(page_now(open_run("one", there)).decode(), expected(run))


def test_a_damaged_and_a_missing_reference_are_named_in_their_places(run: Run, tmp_path: Path):
    whole = page_now(open_run("one", run.store_url)).decode()
    (first, second), *_ = (one.references for one in run.plan.validation_prompts)
    kept = {one.digest: store.read(store.join(pool(run), one.digest)) for one in (first, second)}
    store.write(store.join(pool(run), first.digest), b"damaged")
    store.remove(store.join(pool(run), second.digest))
    opened = open_run("one", run.store_url)
    try:
        page, grid = page_now(opened).decode(), contents.pictures(opened.collected())
        with writing.Pages(run, print) as pages:
            imagined = Imagined(run, tmp_path)
            imagined.done = pages.done
            loop.make(run, imagined.launch)
    finally:
        for digest, data in kept.items():
            store.write(store.join(pool(run), digest), data)
    assert pages.finished is None  # so that the page is made again
    faults = {first.digest: "damaged", second.digest: "missing"}
    for digest, fault in faults.items():
        why = f"no picture: the reference {digest[:12]} is {fault}"
        assert page.count(f'<p class="failed">{why}</p><div class="line"><span>reference') > 1
        assert why in grid
    # Nothing else is another one.
    left_out = re.compile(
        r'<div>(<img[^>]* alt="reference \d">|<p class="failed">no picture.*?</p>)(?=<div class="line">)'
    )
    assert left_out.sub("", page) == left_out.sub("", whole)
