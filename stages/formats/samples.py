"""Generated samples on disk, written by `rollout` and `evaluate`, read by everything after them.

A sample in a shard is what anyone can open: ``<id>.json`` (prompt, seed, policy), ``<id>.png`` or ``<id>.mkv`` (exactly
what the reward saw) and, from a rollout, ``<id>.safetensors`` (the final latents). ``index.parquet`` has a row for
each. A sample that is not finite has no picture: its JSON has ``"finite": false``, and so has its row in a column that
there is only then. Nothing scores it or trains on it.
"""

import io
import json
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd
from safetensors.numpy import load

from cosmos_rl_core import seeds
from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ArtifactError, DivergenceError
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES
from cosmos_rl_core.storage import media, shards
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import Check, tar_of
from stages.context import Context
from stages.contracts import MediaShape

INDEX = "index.parquet"
_NONFINITE = "nonfinite/"
VAE_SAMPLE_BYTES = 32 * 2**20
"""Float32 pixels of a sample beyond which the VAE takes one at a time: a video of 480p from 8 frames on, an image from
2.8 megapixels on. It depends on the sample alone, so that no cut of the work changes bits."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class SamplePlan:
    """One sample to be generated."""

    sample_id: str
    prompt: Prompt
    member: int
    seed: int
    """All its draws derive from it."""
    noise_seed: int
    """The initial noise derives from it: ``seed``, or one that the samples of a prompt share."""


def plan_samples(
    prompts: tuple[Prompt, ...], n_generation: int, run_seed: int, iteration: int, *, same_noise: bool = False
) -> list[SamplePlan]:
    """Every member of every prompt's group, in order, with its seeds."""
    plans: list[SamplePlan] = []
    for prompt in prompts:
        for member in range(n_generation):
            seed = seeds.sample_seed(run_seed, iteration, prompt.id, member)
            shared = seeds.derive("shared noise", run_seed, iteration, prompt.id)
            noise_seed = shared if same_noise else seed
            plans.append(SamplePlan(f"{prompt.id}-{member:03d}", prompt, member, seed, noise_seed))
    return plans


def vae_batches(num_samples: int, media: MediaShape) -> list[slice]:
    """Return the parts of a batch that the VAE takes at once: all of it, or one by one where a sample is large.

    What a VAE holds grows with the pixels of its batch, and is by far the most of a video's memory.
    """
    sample_bytes = FLOAT32_BYTES * 3 * media.frames * math.prod(media.size)
    at_once = num_samples if sample_bytes <= VAE_SAMPLE_BYTES else 1
    return [slice(start, start + at_once) for start in range(0, num_samples, at_once)]


def cut(items: list[Item], size: int) -> list[list[Item]]:
    """Consecutive runs of at most ``size``."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def sample_files(
    sample: SamplePlan, pixels: np.ndarray | None, latents: bytes | None, facts: dict[str, Any]
) -> dict[str, bytes]:
    """The shard members of one sample. ``pixels`` uint8 ``[frames, height, width, 3]``, None where the sample is not
    finite; ``facts`` go into its JSON."""
    about = {
        "sample_id": sample.sample_id,
        "prompt_id": sample.prompt.id,
        "prompt": sample.prompt.text,
        "member": sample.member,
        "seed": sample.seed,
        **facts,
        **({"finite": False} if pixels is None else {}),
    }
    files = {f"{sample.sample_id}.json": json.dumps(about, sort_keys=True).encode()}
    if pixels is not None:
        extension, picture = media.encode(pixels)
        files[f"{sample.sample_id}.{extension}"] = picture
    return files if latents is None else files | {f"{sample.sample_id}.safetensors": latents}


def write_samples(
    context: Context,
    samples: list[SamplePlan],
    generate: Callable[[list[SamplePlan]], dict[str, bytes]],
    *,
    samples_per_shard: int,
    tile: int,
    accompany: Callable[[list[SamplePlan]], object] | None = None,
) -> dict[str, float]:
    """Write ``samples/<n>.tar`` and ``index.parquet``: every rank its shards, adopted where an earlier attempt made
    them; peers have the same, and their leader writes them.

    ``generate`` turns at most ``tile`` samples, all of one shard, into shard members. ``accompany`` is for ranks that
    share weights, all of which must do as many forward passes: what of ``generate`` needs those weights, and no more,
    for who has less to make than others. Raises :class:`DivergenceError` if no sample at all is finite.
    """
    ranks = context.ranks
    by_id = {sample.sample_id: sample for sample in samples}
    layout = context.layout({"shards": cut(list(by_id), samples_per_shard), "tile": context.shrunk(tile)})
    shard_ids: list[list[str]] = layout["shards"]
    tiles = [cut([by_id[sample_id] for sample_id in ids], layout["tile"]) for ids in shard_ids]
    mine = {index: len(shard_ids[index]) for index in range(ranks.data_rank, len(shard_ids), ranks.data_world_size)}
    total = sum(mine.values())
    adopted = _adopt(context, mine, shard_ids)
    to_make = [index for index in mine if index not in adopted]
    num_calls = sum(len(tiles[index]) for index in to_make)
    # Before the first of them, whose forward pass waits for all ranks.
    most_calls = num_calls if accompany is None else max(ranks.gather(num_calls))
    done = sum(mine[index] for index in adopted)
    for index in to_make:
        members: dict[str, bytes] = {}
        for plans in tiles[index]:
            context.progress("sampling", done, total)
            members |= generate(plans)
            done += len(plans)
        if ranks.leads:
            files = {shard_name(index): shards.pack(members)} | _nonfinite_file(index, members)
            context.attempt.finish(index, files, _check(index, shard_ids))
        context.progress("sampling", done, total)
    if accompany is not None:
        for call in range(num_calls, most_calls):
            context.progress("sampling beside the others", call, most_calls)
            accompany(tiles[0][0])
    nonfinite = _all_nonfinite(context)
    if len(nonfinite) == len(samples):
        raise DivergenceError(
            f"none of {len(samples)} samples is finite, e.g. {samples[0].sample_id}: the policy, or its precision, is "
            "broken; begin again at an earlier policy, or compute in float32"
        )
    if ranks.rank == 0:
        context.attempt.put(INDEX, index_of(samples, shard_ids, nonfinite))
    size = sum(entry.size for name, entry in context.attempt.files.items() if name.startswith("samples/"))
    counts = {"samples": len(samples)} | ({"nonfinite": len(nonfinite)} if nonfinite else {})
    return counts | ({"kb_per_sample": size / total / 1000} if total else {})


def _nonfinite_file(index: int, members: dict[str, bytes]) -> dict[str, bytes]:
    """A shard's list of samples that are not finite, beside the shard; nothing where all are."""
    pictures = {f"{name.rpartition('.')[0]}.json" for name in members if name.endswith((media.IMAGE, media.VIDEO))}
    ids = [name.removesuffix(".json") for name in members if name.endswith(".json") and name not in pictures]
    return {f"{_NONFINITE}{index:05d}.json": canonical_json(ids)} if ids else {}


def _all_nonfinite(context: Context) -> frozenset[str]:
    """Ids of the samples of all ranks' shards, adopted ones too, that are not finite."""
    files = [name for name in context.attempt.files if name.startswith(_NONFINITE)]
    mine = [sample_id for name in files for sample_id in json.loads(context.attempt.read(name))]
    return frozenset(sample_id for ids in context.ranks.gather(mine) for sample_id in ids)


def _adopt(context: Context, sizes: dict[int, int], shard_ids: list[list[str]]) -> set[int]:
    """Which of the shards, of known sizes and samples, an earlier attempt finished; they are part of this one now.

    Asked once, of the peers' leader: peers make the others together, and ranks in step must know how many they are.
    """
    found: list[int] = []
    for index in sizes if context.ranks.leads else ():
        context.progress("sampling", sum(sizes[one] for one in found), sum(sizes.values()))
        found += [index] if context.attempt.adopt(index, _check(index, shard_ids)) else []
    return set(context.ranks.broadcast_to_peers(found))


def _check(index: int, shard_ids: list[list[str]]) -> Check:
    return tar_of(shard_name(index), shard_ids[index], besides=f"{_NONFINITE}{index:05d}.json")


def shard_name(index: int) -> str:
    """Name of a shard's file."""
    return f"samples/{index:05d}.tar"


def index_of(samples: list[SamplePlan], layout: list[list[str]], nonfinite: Collection[str] = ()) -> bytes:
    """The parquet index: one row a sample, in order, with the shard it is in; and, if there are samples that are not
    finite, whether it is."""
    shard_of = {sample_id: number for number, ids in enumerate(layout) for sample_id in ids}
    rows = [
        {
            "sample_id": s.sample_id,
            "prompt_id": s.prompt.id,
            "prompt": s.prompt.text,
            "member": s.member,
            "seed": s.seed,
            "shard": shard_of[s.sample_id],
            **({"finite": s.sample_id not in nonfinite} if nonfinite else {}),
        }
        for s in samples
    ]
    return to_parquet(pd.DataFrame(rows))


def are_finite(index: pd.DataFrame) -> pd.Series:
    """Of each row of an index, or of several put together, whether the sample is finite."""
    known = index["finite"] if "finite" in index else pd.Series(data=True, index=index.index)
    return cast("pd.Series", known.ne(False))  # an index without the column leaves gaps


def to_parquet(frame: pd.DataFrame) -> bytes:
    """A table as a file; equal tables, equal bytes."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, engine="pyarrow")
    return buffer.getvalue()


def read_table(artifact: Artifact, name: str) -> pd.DataFrame:
    """A parquet file of an artifact."""
    return pd.read_parquet(io.BytesIO(artifact.read(name)), engine="pyarrow")


@dataclass(frozen=True)
class StoredSample:
    """One sample read back."""

    about: dict[str, Any]
    extension: str
    media: bytes
    """Empty where the sample is not finite."""
    latents: bytes | None

    @property
    def sample_id(self) -> str:
        """The sample's id."""
        return self.about["sample_id"]

    @property
    def finite(self) -> bool:
        """Whether there is a picture to score."""
        return self.about.get("finite", True)

    @property
    def pixels(self) -> np.ndarray:
        """Uint8 RGB ``[frames, height, width, 3]``. Raises :class:`ArtifactError` if the sample is not finite."""
        if not self.finite:
            raise ArtifactError(f"sample {self.sample_id} is not finite: it has no picture")
        return media.decode(self.extension, self.media)

    @property
    def final_latents(self) -> np.ndarray | None:
        """The final latents, normalised, float32 ``[C, H, W]`` or ``[C, T, H, W]``; None where none were stored."""
        return None if self.latents is None else load(self.latents)["latents"]


def shard_names(artifact: Artifact) -> list[str]:
    """Names of the shards, in order."""
    return artifact.names("samples/")


def read_shard(artifact: Artifact, name: str) -> Iterator[StoredSample]:
    """The samples of one shard, sorted by id."""
    return _unpack(artifact.read(name))


def _unpack(shard: bytes) -> Iterator[StoredSample]:
    files = shards.unpack(shard)
    for about_name in sorted(name for name in files if name.endswith(".json")):
        stem = about_name.removesuffix(".json")
        extension = media.IMAGE if f"{stem}.{media.IMAGE}" in files else media.VIDEO
        about = json.loads(files[about_name])
        picture = files[f"{stem}.{extension}"] if about.get("finite", True) else b""
        yield StoredSample(about, extension, picture, files.get(f"{stem}.safetensors"))
