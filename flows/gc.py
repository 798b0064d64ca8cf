"""Free what a run no longer needs."""

from cosmos_rl_core import store
from flows.steps import open_run, steps
from stages.garbage import garbage


def gc(store_url: str, run_id: str, *, superseded: bool, dry_run: bool) -> list[str]:
    """Delete files of the run that no artifact holds; returns what to tell people.

    Datasets are shared by runs and left alone. Raises :class:`LeaseError` while a process works on the run.
    """
    run = open_run(store_url, run_id)
    lines, total = [], 0
    with run.lease():
        for step in steps(run):
            if not step.slot.startswith(run.url) or not (found := garbage(step.slot, superseded=superseded)):
                continue
            size = sum(found.values())
            lines.append(f"{step.name:<28} {len(found):>6} files {size / 1e6:>12.1f} MB")
            total += size
            for name in () if dry_run else found:
                store.remove(store.join(step.slot, name))
    if not lines:
        return [f"nothing to delete in {run.url}"]
    return [*lines, f"{'would free' if dry_run else 'freed'} {total / 1e6:.1f} MB"]
