"""Do what-ifs on stored rollouts rank settings as real runs do? On the tiny model, eight iterations of 96 samples.

``python -m docs.studies.what_if.study`` makes a run with every seed, then every setting twice: as a real run, and as a
what-if on the rollouts of the run of its seed, with a control whose rewards are shuffled. It writes ``results.csv``,
``results.md`` and ``results.svg``. The same command, given again, goes on after the finished runs. ``--read`` trains
nothing: it takes the runs that there are, or a ``results.csv`` without a store.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cosmos_rl_core import seeds as keyed
from flows.library.tables import held_out
from flows.planning.steps import read_run
from flows.studying.study import read

RECIPE = "configs/tiny/nft.toml"
SEEDS = (0, 1)
ITERATIONS = 8
COMMON = ("validation.n_generation=8",)
_POLICY = "train.train_policy"
_OCR = '{ fn = { name = "ocr", line_width = 96 } }'
_RFT, _DPO = (f"{_POLICY}.type=rft",), (f"{_POLICY}.type=dpo", f"{_POLICY}.beta=100")
SETTINGS: dict[str, tuple[str, ...]] = {
    **{f"nft, lr {lr}": (f"train.optm_lr={lr}",) for lr in ("1e-4", "3e-4", "3e-3", "1e-2")},
    "nft, beta 0.1": (f"{_POLICY}.nft_beta=0.1",),
    "nft, KL 1": (f"{_POLICY}.kl_beta=1.0",),
    "nft, OCR and JPEG": (f'rewards=[{_OCR}, {{ weight = 0.2, fn = {{ name = "jpeg" }} }}]',),
    **{f"rft, lr {lr}": (*_RFT, f"train.optm_lr={lr}") for lr in ("3e-4", "3e-3")},
    **{f"dpo, lr {lr}": (*_DPO, f"train.optm_lr={lr}") for lr in ("3e-4", "1e-3", "3e-3")},
}
"""Changes of each setting to the run. The run's own setting, NFT at 1e-3, is left out: its what-if is the run."""
RESAMPLES = 2000


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="outputs")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time, each on one core")
    parser.add_argument("--out", type=Path, default=Path("outputs/what-if"))
    parser.add_argument("--read", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.csv"
    if not options.read:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda seed: _make(seed, options.store), SEEDS))
    if not options.read or not file.exists():
        pd.concat([*_results(options.store)], ignore_index=True).to_csv(file, index=False, float_format="%.6g")
    results = pd.read_csv(file, keep_default_na=False, na_values={"drift": [""]})
    table = by_setting(results)
    (options.out / "results.md").write_text(markdown(table, results), encoding="utf-8")
    draw(table, options.out / "results.svg")
    print(markdown(table, results))


def _make(seed: int, store: str) -> None:
    """Make the run of a seed, and every setting with this seed, as a real run and as a what-if."""
    origin, common = f"what-if-origin-{seed}", [word for one in COMMON for word in ("--set", one)]
    common += ["--store", store]
    own = ("--iterations", str(ITERATIONS), "--set", f"train.seed={seed}")
    _flows("run", RECIPE, "--run-id", origin, *common, *own)
    for name, changes in SETTINGS.items():
        given = [*common, *(word for one in changes for word in ("--set", one))]
        slug = _slug(name)
        _flows("what-if", origin, "--controls", "1", "--max-drift", "1000", "--name", f"if-{slug}-{seed}", *given)
        # A real run begins with the first rollout of the run, which depends on no setting.
        real = ("--at", "0", "--iterations", str(ITERATIONS), "--run-id", f"real-{slug}-{seed}")
        _flows("fork", origin, *real, *given)


def _slug(name: str) -> str:
    return re.sub("[^a-z0-9.]+", "-", name.lower())


def _flows(*words: str) -> None:
    """Run ``cosmos-flows`` in a process of its own. Raises ``CalledProcessError`` if it fails."""
    subprocess.run([sys.executable, "-m", "flows", *words], check=True)


def _results(store: str) -> Iterator[Any]:
    """Yield tables with one row per held-out prompt: its mean OCR score by a final policy, or by the base.

    Settings that have no finished run are left out.
    """
    runs = Path(store, "runs")
    for seed in SEEDS:
        for kind, k in (("base", 0), ("origin", ITERATIONS)):
            yield _of_run(store, f"what-if-origin-{seed}", k, seed=seed, setting="", kind=kind)
    for name in SETTINGS:
        real = {seed: f"real-{_slug(name)}-{seed}" for seed in SEEDS}
        if not all(
            Path(runs, one, "exports", f"{ITERATIONS:04d}", "fragment/manifest.1.json").exists()
            for one in real.values()
        ):
            continue
        for seed, run_id in real.items():
            named: dict[str, Any] = {"seed": seed, "setting": name}
            yield _of_run(store, run_id, ITERATIONS, kind="real", **named)
            for member in read(store, f"if-{_slug(name)}-{seed}").members[1:]:
                kind = "shuffled" if member.control else "what-if"
                yield _of_run(store, member.run, ITERATIONS, kind=kind, **named)


def _of_run(store: str, run_id: str, k: int, **named: Any) -> Any:
    means: Any = held_out(read_run(store, run_id), k).groupby("prompt_id")["ocr"].mean()
    return means.reset_index().assign(**named, drift=_drift(store, run_id))


def _drift(store: str, run_id: str) -> float:
    """Return the largest drift of a run's updates; NaN if none has a drift."""
    found = Path(store, "runs", run_id).glob("iterations/*/update/manifest.1.json")
    bodies = (json.loads(path.read_bytes())["body"] for path in found)
    drifts = (body.get("summary", {}).get("drift") for body in bodies)
    return max((float(drift) for drift in drifts if drift is not None), default=math.nan)


def by_setting(results: Any) -> Any:
    """Return a row for each setting and seed: held-out OCR of the real run, of the what-if and of its control."""
    keys = ["seed", "setting"]
    of = results[results["setting"] != ""]
    found = of.pivot_table(index=keys, columns="kind", values="ocr", aggfunc="mean").reset_index()
    drift = of[of["kind"] == "what-if"].groupby(keys)["drift"].max().reset_index()
    base = results[results["kind"] == "base"]["ocr"].mean()
    found = found.merge(drift, on=keys).assign(base=base)
    # The OCR score is less than half of the base's.
    return found.assign(collapsed=found["real"] < 0.5 * base, algorithm=found["setting"].str.partition(",")[0])


def spearman(a: Any, b: Any) -> float:
    """Return the rank correlation of two columns; NaN if one is constant."""
    ranks = np.array([pd.Series(np.asarray(one)).rank() for one in (a, b)], dtype=np.float64)
    products = np.asarray(np.corrcoef(ranks))
    return float(products[0, 1]) if (ranks.std(axis=1) > 0).all() else math.nan


def mean_rho(table: Any, kind: str) -> float:
    """Return the rank correlation with real runs within each seed, as its mean over seeds."""
    return float(np.mean([spearman(some["real"], some[kind]) for _, some in table.groupby("seed")]))


def permutation_p(table: Any, kind: str) -> float:
    """Return the share of random orders of the settings, drawn for each seed, with at least as high a correlation."""
    found, generator = mean_rho(table, kind), keyed.generator("what-if study", "permutations")
    parts = [some for _, some in table.groupby("seed")]
    higher = 0
    for _ in range(RESAMPLES):
        rhos = [spearman(one["real"], generator.permutation(one[kind].to_numpy())) for one in parts]
        higher += float(np.mean(rhos)) >= found - 1e-12
    return (higher + 1) / (RESAMPLES + 1)


def bootstrap(results: Any, keep: Callable[[Any], Any], kind: str) -> tuple[float, float]:
    """Return the 5 % and 95 % quantiles of the correlation over held-out prompts and seeds drawn with replacement."""
    generator = keyed.generator("what-if study", "bootstrap")
    keys = ["seed", "setting", "kind", "prompt_id"]
    means = results.groupby(keys)["ocr"].mean().unstack("prompt_id")
    wanted = keep(by_setting(results)).set_index(["seed", "setting"]).index
    rhos: list[float] = []
    for _ in range(RESAMPLES // 4):
        columns = generator.integers(0, means.shape[1], means.shape[1])
        drawn = means.iloc[:, columns].mean(axis=1).unstack("kind").loc[wanted].reset_index()
        picked = [drawn[drawn["seed"] == SEEDS[i]] for i in generator.integers(0, len(SEEDS), len(SEEDS))]
        rhos.append(float(np.mean([spearman(one["real"], one[kind]) for one in picked])))
    low, high = np.nanquantile(rhos, [0.05, 0.95])
    return float(low), float(high)


def ceiling(table: Any) -> tuple[float, float]:
    """Return the rank correlation r of real runs of two seeds, and the highest one that a what-if can reach.

    It is ``sqrt(2 r / (1 + r))``, the correlation of a run with the mean over endlessly many seeds.
    """
    one, other = (some.set_index("setting")["real"] for _, some in table.groupby("seed"))
    r = spearman(one, other.reindex(one.index))
    return r, math.sqrt(max(0.0, 2 * r / (1 + r))) if r > -1 else math.nan


def markdown(table: Any, results: Any) -> str:
    """Return a table of the settings, and one of rank correlations."""
    lines = ["| setting | real run | what-if | shuffled | drift |", "|---|---|---|---|---|"]
    for setting, some in table.groupby("setting", sort=False):
        cells = [
            " / ".join(f"{value:.3g}" for value in some[name]) for name in ("real", "what-if", "shuffled", "drift")
        ]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    lines += [
        "",
        "| settings | n | rho | 5 % to 95 % | p | rho of shuffled | r of two seeds | ceiling |",
        "|" + "---|" * 8,
    ]
    for name, keep in _selections(table):
        some = keep(table)
        if some.groupby("seed").size().min() < 3:
            continue
        rho, shuffled, (low, high) = (
            mean_rho(some, "what-if"),
            mean_rho(some, "shuffled"),
            bootstrap(results, keep, "what-if"),
        )
        r, limit = ceiling(some)
        numbers = [f"{rho:.2f}", f"{low:.2f} to {high:.2f}", f"{permutation_p(some, 'what-if'):.3f}", f"{shuffled:.2f}"]
        lines.append(f"| {name} | {len(some) // len(SEEDS)} | {' | '.join(numbers)} | {r:.2f} | {limit:.2f} |")
    return "\n".join(lines) + "\n"


def _selections(table: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "all", lambda t: t
    collapsed = {*table.loc[table["collapsed"], "setting"]}
    yield "not collapsed", lambda t: t[~t["setting"].isin(collapsed)]
    for algorithm in dict.fromkeys(table["algorithm"]):
        yield algorithm, lambda t, algorithm=algorithm: t[t["algorithm"] == algorithm]


def draw(table: Any, path: Path) -> None:
    """Draw what-ifs against real runs, and their error against drift."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for algorithm, some in table.groupby("algorithm"):
        left.scatter(some["real"], some["what-if"], label=str(algorithm))
        right.scatter(some["drift"], (some["what-if"] - some["real"]).abs(), label=str(algorithm))
    left.axline((table["base"].iloc[0],) * 2, slope=1, color="0.7", linewidth=1)
    left.set(xlabel="held-out OCR of the real run", ylabel="of the what-if", title="Final policies, a point a seed")
    right.set(xlabel="largest drift", ylabel="|what-if - real|", xscale="log", title="Error against drift")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
