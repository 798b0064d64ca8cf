"""Units of generated samples: how they are divided among ranks, made, and written."""

import json
from collections.abc import Sequence
from itertools import chain, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from cosmos_rl_core.errors import ConfigError, DivergenceError
from stages.artifacts.layouts import cut, holds
from stages.contracts import INDEX, MEDIA, TENSORS, Samples
from stages.execution.context import Context
from stages.formats.samples import KB_PER_SAMPLE, REFUSED, StoredSample, unit_files, unit_name
from stages.generating.encoding import Encoding, UnitWriter
from stages.generating.plans import SamplePlan

if TYPE_CHECKING:
    from cosmos_rl_core.parallel.distributed import Group


class Generator(Protocol):
    """Makes planned samples, a tile at a time: at most ``batch_size`` samples of one unit."""

    def sample(self, plans: list[SamplePlan]) -> Any:
        """Sample a tile. Context-parallel peers do it together, and with sharded weights all ranks do."""
        ...

    def encodings(self, plans: list[SamplePlan], sampled: Any) -> list[Encoding]:
        """Return what encodes each sample of a tile from what :meth:`sample` returned. One of the peers calls it."""
        ...


def divided(ids: list[str], size: int, tile: int, num_groups: int, num_peers: int = 1) -> list[list[str]]:
    """Divide samples into units of at most ``size``, so that groups of peers differ by at most one tile.

    A unit has whole tiles, so that no forward batch depends on the number of ranks. As many units as all ranks can
    share evenly have the full size; the tiles of the others are dealt out evenly.
    """
    size, num_ranks = max(size // tile, 1) * min(tile, size), num_groups * num_peers
    whole = len(ids) // size // num_ranks * num_ranks
    tiles = cut(ids[whole * size :], min(tile, size))
    # Of peers each decodes units of its own, so that single tiles divide decoding best.
    count = min(len(tiles), num_groups) if num_peers == 1 else len(tiles)
    bounds = [-(-len(tiles) * part // count) for part in range(count + 1)] if tiles else []
    return cut(ids[: whole * size], size) + [list(chain.from_iterable(tiles[a:b])) for a, b in pairwise(bounds)]


def dealt(num_tiles: Sequence[int], num_groups: int, num_peers: int) -> list[int]:
    """Return the rank that decodes and writes each unit, of which ``num_tiles`` has the number of tiles.

    Each unit goes to the group of peers with the fewest tiles so far, and in it to the peer with the fewest.
    """
    load = [[0] * num_peers for _ in range(num_groups)]
    owners: list[int] = []
    for count in num_tiles:
        group = min(range(num_groups), key=lambda one: sum(load[one]))
        peer = min(range(num_peers), key=load[group].__getitem__)
        load[group][peer] += count
        owners.append(group * num_peers + peer)
    return owners


def write_samples(
    context: Context["Group"], config: Samples, samples: list[SamplePlan], generator: Generator, *, tensors: bool
) -> dict[str, float]:
    """Write the units of all samples and return their number and mean size. Collective.

    Each rank decodes and writes its own units and adopts those that an earlier attempt finished. Context-parallel peers
    sample the units of all of them together. With ``tensors`` each sample has tensors. Under sharded weights every rank
    must do the same number of forward passes: a rank with fewer tiles samples one again for the rest. Raises
    :class:`DivergenceError` if no sample is finite, and :class:`ConfigError` if a guardrail refuses all that are.
    """
    ranks = context.ranks
    num_groups, num_peers = ranks.data_world_size, ranks.world_size // ranks.data_world_size
    by_id, tile = {sample.sample_id: sample for sample in samples}, context.shrunk(config.batch_size)
    planned = divided(list(by_id), config.samples_per_shard, tile, num_groups, num_peers)
    layout = context.layout({"units": planned, "tile": tile})
    units: list[list[str]] = layout["units"]
    tiles = [cut([by_id[sample_id] for sample_id in ids], layout["tile"]) for ids in units]
    parts = (INDEX, MEDIA, TENSORS) if tensors else (INDEX, MEDIA)
    checks = [holds([unit_name(part, n) for part in parts], ids) for n, ids in enumerate(units)]
    owners = dealt([len(parts) for parts in tiles], num_groups, num_peers)
    mine = [n for n, owner in enumerate(owners) if owner == ranks.rank]
    ours = [n for n, owner in enumerate(owners) if owner // num_peers == ranks.data_rank]
    total = sum(len(units[n]) for n in ours)

    found: list[int] = []
    for n in mine:
        context.progress("sampling", sum(len(units[one]) for one in found), total)
        found += [n] if context.attempt.adopt(n, checks[n]) else []
    adopted = {n for some in ranks.gather(found) for n in some}
    to_make = [n for n in ours if n not in adopted]
    num_calls = sum(len(tiles[n]) for n in to_make)
    # Gathered before the first forward pass, which waits for all ranks.
    most_calls = num_calls if ranks.mesh is None else max(ranks.gather(num_calls))
    done = sum(len(units[n]) for n in ours if n in adopted)

    def write(number: int, made: list[StoredSample]) -> None:
        context.attempt.finish(number, unit_files(number, made), checks[number])

    with UnitWriter({n: len(units[n]) for n in mine}, write) as writer:
        # Peers sample a tile for each of them, then all of them decode at the same time.
        for together in cut(to_make, num_peers):
            for row in zip_longest(*(tiles[n] for n in together)):
                own: list[tuple[int, list[SamplePlan], Any]] = []
                for n, plans in zip(together, row, strict=True):
                    if plans is None:
                        continue
                    context.progress("sampling", done, total)
                    sampled = generator.sample(plans)
                    own += [(n, plans, sampled)] if owners[n] == ranks.rank else []
                    done += len(plans)
                for n, plans, sampled in own:
                    writer.take(n, generator.encodings(plans, sampled))
        context.progress("sampling", done, total)
        for call in range(num_calls, most_calls):
            context.progress("sampling beside the other ranks", call, most_calls)
            generator.sample(tiles[0][0])
    return _summary(context, samples, mine)


def _summary(context: Context["Group"], samples: list[SamplePlan], mine: list[int]) -> dict[str, float]:
    """Count the samples without pixels and the refused ones, and measure the files, of all ranks. Collective."""
    indices = [context.attempt.read(unit_name(INDEX, number)) for number in mine]
    rows = [row for index in indices for row in json.loads(index)]
    nonfinite = sum(context.ranks.gather(sum(not row["finite"] for row in rows)))
    refused = sum(context.ranks.gather(sum(REFUSED in row for row in rows)))
    if refused and nonfinite == len(samples):
        raise ConfigError(
            f"the guardrail refuses all {refused} samples that were decoded, e.g. of the prompt "
            f"{samples[0].prompt.text!r}; take other prompts, or begin again at an earlier policy"
        )
    if nonfinite == len(samples):
        raise DivergenceError(
            f"none of {len(samples)} samples is finite, e.g. {samples[0].sample_id}: the policy, or its precision, is "
            "broken; begin again at an earlier policy, or compute in float32"
        )
    counts = {"samples": len(samples)} | ({"nonfinite": nonfinite} if nonfinite else {})
    counts |= {"refused": refused} if refused else {}
    size = sum(context.ranks.gather(sum(entry.size for entry in context.attempt.files.values())))
    return counts | {KB_PER_SAMPLE: size / len(samples) / 1000}
