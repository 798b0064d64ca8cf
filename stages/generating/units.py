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
from stages.generating.plans import SamplePlan, tiles_of

if TYPE_CHECKING:
    from cosmos_rl_core.parallel.distributed import Group


ELASTIC_UNITS = 64
"""Units of an elastic stage: fewer if there are fewer tiles, more if they would be larger than the recipe allows."""


class Generator(Protocol):
    """A maker of planned samples, one tile at a time: at most ``batch_size`` samples of one unit."""

    def sample(self, plans: list[SamplePlan]) -> Any:
        """Sample a tile. Context-parallel peers do it together, and with sharded weights all ranks do."""
        ...

    def encodings(self, plans: list[SamplePlan], sampled: Any) -> list[Encoding]:
        """Return for each sample of a tile the function that encodes it. One of the peers calls this.

        ``sampled`` is what :meth:`sample` returned for the tile.
        """
        ...


def divided(ids: list[str], size: int, tile: int, num_groups: int, num_peers: int = 1) -> list[list[str]]:
    """Divide samples into units of at most ``size``, so that groups of peers differ by at most one tile.

    A unit has whole tiles, so that no forward batch depends on the number of ranks. The ranks share as many full units
    as they can share evenly; the tiles that remain are dealt out evenly, in smaller units.
    """
    size, num_ranks = max(size // tile, 1) * min(tile, size), num_groups * num_peers
    whole = len(ids) // size // num_ranks * num_ranks
    tiles = cut(ids[whole * size :], min(tile, size))
    # Each peer decodes units of its own, so units of one tile divide the decoding best.
    count = min(len(tiles), num_groups) if num_peers == 1 else len(tiles)
    bounds = [-(-len(tiles) * part // count) for part in range(count + 1)] if tiles else []
    return cut(ids[: whole * size], size) + [list(chain.from_iterable(tiles[a:b])) for a, b in pairwise(bounds)]


def divided_for_workers(ids: list[str], size: int, tile: int) -> list[list[str]]:
    """Divide samples into :data:`ELASTIC_UNITS` units of at most ``size``, whatever the number of workers.

    Units have whole tiles, the same tiles as in :func:`divided`.
    """
    tile = min(tile, size)
    return cut(ids, min(size // tile, -(-len(ids) // (ELASTIC_UNITS * tile))) * tile)


def dealt(num_tiles: Sequence[int], num_groups: int, num_peers: int) -> list[int]:
    """Return for each unit the rank that decodes and writes it. ``num_tiles`` are the units' numbers of tiles.

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

    Each rank decodes and writes its own units and adopts units that an earlier attempt finished. Context-parallel peers
    sample their units together. With ``tensors`` each sample has tensors. Under sharded weights every rank must do the
    same number of forward passes: a rank with fewer tiles repeats a tile. Raises
    :class:`DivergenceError` if no sample is finite, and :class:`ConfigError` if a guardrail refuses all finite samples.
    """
    by_id, tile = {sample.sample_id: sample for sample in samples}, context.shrunk(config.batch_size)
    tiles = tiles_of(samples, min(tile, config.samples_per_shard), config.model.path)
    planned = _planned(context, config, [[sample.sample_id for sample in part] for part in tiles])
    layout = context.layout({"units": planned, "tile": tile})
    units = [[by_id[sample_id] for sample_id in ids] for ids in layout["units"]]
    making = _Making(
        context, generator, [tiles_of(unit, layout["tile"], config.model.path) for unit in units], tensors=tensors
    )
    with UnitWriter(dict(enumerate(map(len, units))), making.write) as writer:
        for together in context.hands(len(units)):
            making.make(together, writer)
    mine = making.owned if context.handed is None else context.own(len(units))
    return _summary(context, samples, [name for n in mine for name in making.names[n]])


def _planned(context: Context["Group"], config: Samples, tiles: list[list[str]]) -> list[list[str]]:
    """Return the ids of each unit's samples. ``tiles`` are the ids of each forward batch."""
    size, tile = config.samples_per_shard, context.shrunk(config.batch_size)
    ids = [*chain.from_iterable(tiles)]
    if len(tiles) > -(-len(ids) // min(tile, size)):
        # Some tiles are smaller, because references have several shapes. Then units are cut by numbers of tiles.
        numbers = _units(context, [str(number) for number in range(len(tiles))], max(size // tile, 1), 1)
        return [[one for number in unit for one in tiles[int(number)]] for unit in numbers]
    return _units(context, ids, size, tile)


def _units(context: Context["Group"], ids: list[str], size: int, tile: int) -> list[list[str]]:
    ranks = context.ranks
    if context.handed is not None:
        return divided_for_workers(ids, size, tile)
    num_groups, num_peers = ranks.data_world_size, ranks.world_size // ranks.data_world_size
    return divided(ids, size, tile, num_groups, num_peers)


class _Making:
    """The work of a rank on units: it makes them tile by tile, together with the other ranks of its group."""

    def __init__(
        self, context: Context["Group"], generator: Generator, tiles: list[list[list[SamplePlan]]], *, tensors: bool
    ) -> None:
        """Set up. ``tiles`` are the forward batches of each unit. With ``tensors`` each sample has tensors."""
        self._context, self._generator, self._tiles = context, generator, tiles
        parts = (INDEX, MEDIA, TENSORS) if tensors else (INDEX, MEDIA)
        self.names = [[unit_name(part, n) for part in parts] for n in range(len(tiles))]
        """Names of the files of each unit."""
        ids = [[plan.sample_id for plan in chain.from_iterable(some)] for some in tiles]
        self._checks = [holds(names, of_unit) for names, of_unit in zip(self.names, ids, strict=True)]
        self._sizes = [len(of_unit) for of_unit in ids]
        self.owned: list[int] = []
        """Units that this rank made or adopted."""
        self._done = self._total = 0
        """Numbers of samples of this rank's group: made or adopted so far, and given to it in all."""

    def write(self, number: int, made: list[StoredSample]) -> None:
        """Write a unit."""
        self._context.attempt.finish(number, unit_files(number, made), self._checks[number])

    def make(self, together: list[int], writer: UnitWriter) -> None:
        """Make units, or adopt units that an earlier attempt finished. Collective."""
        context, ranks, tiles = self._context, self._context.ranks, self._tiles
        num_groups, num_peers = ranks.data_world_size, ranks.world_size // ranks.data_world_size
        dealt_to = dealt([len(tiles[n]) for n in together], num_groups, num_peers)
        owners = dict(zip(together, dealt_to, strict=True))
        ours = [n for n in together if owners[n] // num_peers == ranks.data_rank]
        self._total += sum(self._sizes[n] for n in ours)
        mine = [n for n in together if owners[n] == ranks.rank]
        self.owned += mine
        found: list[int] = []
        for n in mine:
            context.progress("sampling", self._done + sum(self._sizes[one] for one in found), self._total)
            found += [n] if context.attempt.adopt(n, self._checks[n]) else []
        adopted = {n for some in ranks.gather(found) for n in some}
        to_make = [n for n in ours if n not in adopted]
        num_calls = sum(len(tiles[n]) for n in to_make)
        # Gathered before the first forward pass, because that waits for all ranks.
        most_calls = num_calls if ranks.mesh is None else max(ranks.gather(num_calls))
        self._done += sum(self._sizes[n] for n in ours if n in adopted)
        # Peers sample a tile for each of them, then all of them decode at the same time.
        for some in cut(to_make, num_peers):
            for row in zip_longest(*(tiles[n] for n in some)):
                own: list[tuple[int, list[SamplePlan], Any]] = []
                # The states of the last tile, which may be gigabytes: the next one needs their memory.
                sampled = None
                for n, plans in zip(some, row, strict=True):
                    if plans is None:
                        continue
                    context.progress("sampling", self._done, self._total)
                    sampled = self._generator.sample(plans)
                    own += [(n, plans, sampled)] if owners[n] == ranks.rank else []
                    self._done += len(plans)
                for n, plans, sampled in own:
                    writer.take(n, self._generator.encodings(plans, sampled))
        context.progress("sampling", self._done, self._total)
        for call in range(num_calls, most_calls):
            context.progress("sampling along with the other ranks", call, most_calls)
            self._generator.sample(tiles[0][0])


def _summary(context: Context["Group"], samples: list[SamplePlan], names: list[str]) -> dict[str, float]:
    """Return the summary: numbers of samples, non-finite and refused ones, and kB per sample, of all ranks. Collective.

    ``names`` are the files of the units of this rank.
    """
    attempt = context.attempt
    indices = [attempt.read(name) for name in names if name.startswith(f"{INDEX}/")]
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
    size = sum(context.ranks.gather(sum(attempt.files[name].size for name in names)))
    return counts | {KB_PER_SAMPLE: size / len(samples) / 1000}
